package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

var errEnded = errors.New("job has ended")

// serve answers the control socket until stop is called.
func (s *Supervisor) serve() (stop func(), err error) {
	ended := make(chan struct{})
	stopSocket, err := serveControl(s.ControlSocket(), s.Status, func(ctx context.Context, req RestartRequest) (RestartReply, error) {
		r := request{req, make(chan result, 1)}
		select {
		case s.requests <- r:
		case <-ended:
			return RestartReply{}, errEnded
		case <-ctx.Done(): // nobody waits for an answer: it was not taken
			return RestartReply{}, ctx.Err()
		}
		// Taken, so it will be answered: Run does so before it returns.
		res := <-r.reply
		if res.err != nil {
			return RestartReply{}, fmt.Errorf("%w: %w", errEnded, res.err)
		}
		return res.r, nil
	})
	return func() {
		close(ended)
		stopSocket()
	}, err
}

// serveControl answers a control socket until stop is called. The socket is in a
// directory that nobody else may enter, and nobody else may write to it. restart
// wraps errEnded when there is no job any more; with its context's error nobody is answered.
func serveControl(path string, status func() Status, restart func(context.Context, RestartRequest) (RestartReply, error)) (stop func(), err error) {
	_ = os.Remove(path) // of a supervisor that was killed: a live one holds the lock
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("run: control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("run: control socket: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { reply(w, status()) })
	mux.HandleFunc("POST /v1/restart", func(w http.ResponseWriter, req *http.Request) {
		var r RestartRequest
		if err := json.NewDecoder(io.LimitReader(req.Body, 1<<16)).Decode(&r); err != nil {
			http.Error(w, fmt.Sprintf("restart request: %v", err), http.StatusBadRequest)
			return
		}
		if r.Action == "" || len(r.Action) > 128 {
			http.Error(w, "restart request: an action id of 1 to 128 bytes is needed, by which a repeat is known", http.StatusBadRequest)
			return
		}
		switch answer, err := restart(req.Context(), r); {
		case err == nil:
			reply(w, answer)
		case errors.Is(err, errEnded):
			http.Error(w, err.Error(), http.StatusGone)
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go srv.Serve(l)
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if srv.Shutdown(ctx) != nil { // answers under way were given their time
			srv.Close()
		}
	}, nil
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client went away: it will ask again
}
