package remediation

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Handler serves
//
//	POST /webhook                  Alertmanager's webhook
//	GET  /api/v1/actions           the journal, oldest first
//	GET  /api/v1/breakers          open breakers
//	POST /api/v1/breakers/close    form values scope, and again=true: what it refused is decided anew
//
// The first is for Token, the last for OperatorToken, the others for both.
func (r *Remediator) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /webhook", r.webhook)
	mux.HandleFunc("GET /api/v1/actions", func(w http.ResponseWriter, _ *http.Request) {
		list := []*Entry{}
		err := r.j.each(func(e *Entry) { list = append(list, e) })
		reply(w, list, err)
	})
	mux.HandleFunc("GET /api/v1/breakers", func(w http.ResponseWriter, _ *http.Request) {
		open, err := r.j.breakers()
		if open == nil {
			open = []BreakerState{}
		}
		reply(w, open, err)
	})
	mux.HandleFunc("POST /api/v1/breakers/close", func(w http.ResponseWriter, req *http.Request) {
		req.Body = http.MaxBytesReader(w, req.Body, 1<<12)
		scope := req.FormValue("scope")
		was, again, err := r.j.closeBreaker(r.o.Now(), scope, req.FormValue("again") == "true")
		if err == nil && !was {
			http.Error(w, fmt.Sprintf("no breaker is open in scope %q", scope), http.StatusNotFound)
			return
		}
		if err == nil {
			r.o.Logger.Warn("breaker closed by a person", "scope", scope, "again", again, "from", req.RemoteAddr)
			r.kick()
		}
		reply(w, map[string]any{"closed": scope, "again": again}, err)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !r.authorized(req) {
			reply, code := ErrUnauthorized.Error(), http.StatusUnauthorized
			if bears(req, r.o.Token) || bears(req, r.o.OperatorToken) {
				reply, code = "this is not what the token is for: webhooks are Alertmanager's, closing breakers is the operator's (--operator-token-file)", http.StatusForbidden
			}
			r.m.webhooks.WithLabelValues(resultUnauthorized).Inc()
			if now := time.Now().Unix(); r.warned.Swap(now) != now { // a line a second at most: anybody can cause it
				r.o.Logger.Warn("request without the token refused", "path", req.URL.Path, "from", req.RemoteAddr)
			}
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, reply, code)
			return
		}
		mux.ServeHTTP(w, req)
	})
}

func reply(w http.ResponseWriter, v any, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client went away: nobody to tell
}

// authorized says whether a request bears the token that it needs.
func (r *Remediator) authorized(req *http.Request) bool {
	switch {
	case req.Method != http.MethodGet && req.Method != http.MethodHead && req.URL.Path != "/webhook":
		return bears(req, r.o.OperatorToken)
	case req.URL.Path == "/webhook":
		return bears(req, r.o.Token)
	}
	return bears(req, r.o.Token) || bears(req, r.o.OperatorToken)
}

// bears compares digests, so that neither content nor length leaks by time.
func bears(req *http.Request, token []byte) bool {
	got, ok := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	a, b := sha256.Sum256([]byte(got)), sha256.Sum256(token)
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1 && ok && len(token) > 0
}

// webhook answers 2xx only after the alerts are on disk: Alertmanager repeats
// what got a 5xx or no answer, and the journal recognises a repeat. What can
// never be accepted gets a 4xx, which Alertmanager does not repeat.
func (r *Remediator) webhook(w http.ResponseWriter, req *http.Request) {
	firing, resolved, bad, err := decode(req.Body)
	if err != nil {
		result := resultMalformed
		switch {
		case errors.Is(err, ErrTruncated):
			result = resultTruncated
		case errors.Is(err, ErrVersion):
			result = resultVersion
		}
		r.m.webhooks.WithLabelValues(result).Inc()
		r.o.Logger.Warn("webhook refused", "result", result, "from", req.RemoteAddr, "err", err)
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if bad > 0 {
		r.m.webhooks.WithLabelValues(resultIncomplete).Add(float64(bad))
		r.o.Logger.Warn("webhook had alerts without the labels that a decision needs", "count", bad)
	}
	now := r.o.Now()
	fresh := slices.DeleteFunc(firing, func(a Alert) bool { return !r.o.Config.current(now, &a) })
	if stale := len(firing) - len(fresh); stale > 0 {
		r.m.webhooks.WithLabelValues(resultStale).Add(float64(stale))
		r.o.Logger.Warn("webhook had stale alerts", "count", stale, "max_age", r.o.Config.MaxAge)
	}
	added, over := 0, 0
	if len(fresh) > 0 {
		if added, over, err = r.j.add(now, now.Add(-r.o.Config.memory()), fresh); err != nil {
			r.m.webhooks.WithLabelValues(resultJournalError).Inc()
			r.o.Logger.Error("webhook not journaled", "err", err)
			http.Error(w, "not journaled, send it again", http.StatusServiceUnavailable)
			return
		}
	}
	if over > 0 {
		r.m.webhooks.WithLabelValues(resultJobFull).Add(float64(over))
		r.o.Logger.Error("alerts left out: too many of their job wait for a decision", "count", over, "most", maxOpenOfJob)
	}
	switch {
	case added > 0:
		r.m.webhooks.WithLabelValues(resultAccepted).Inc()
		r.kick()
	case len(fresh) > over:
		r.m.webhooks.WithLabelValues(resultDuplicate).Inc()
	case resolved > 0:
		r.m.webhooks.WithLabelValues(resultResolved).Inc()
	}
	reply(w, map[string]int{"journaled": added}, nil)
}
