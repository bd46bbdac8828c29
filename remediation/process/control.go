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

// serve answers the control socket until stop is called. The socket is in a
// directory that nobody else may enter, and nobody else may write to it.
func (s *Supervisor) serve() (stop func(), err error) {
	path := s.ControlSocket()
	_ = os.Remove(path) // of a supervisor that was killed: a live one holds the lock
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("run: control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("run: control socket: %w", err)
	}
	ended := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { reply(w, s.Status()) })
	mux.HandleFunc("POST /v1/restart", func(w http.ResponseWriter, req *http.Request) {
		r := request{reply: make(chan result, 1)}
		if err := json.NewDecoder(io.LimitReader(req.Body, 1<<16)).Decode(&r.RestartRequest); err != nil {
			http.Error(w, fmt.Sprintf("restart request: %v", err), http.StatusBadRequest)
			return
		}
		if r.Action == "" || len(r.Action) > 128 {
			http.Error(w, "restart request: an action id of 1 to 128 bytes is needed, by which a repeat is known", http.StatusBadRequest)
			return
		}
		select {
		case s.requests <- r:
		case <-ended:
			http.Error(w, errEnded.Error(), http.StatusGone)
			return
		case <-req.Context().Done(): // nobody waits for an answer: it was not taken
			return
		}
		// Taken, so it will be answered: Run does so before it returns.
		if res := <-r.reply; res.err != nil {
			http.Error(w, fmt.Sprintf("%v: %v", errEnded, res.err), http.StatusGone)
		} else {
			reply(w, res.r)
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go srv.Serve(l)
	return func() {
		close(ended)
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
