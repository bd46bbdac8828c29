package web

import (
	"net/http"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// refusals counts the requests that were refused, by reason.
type refusals map[string]*atomic.Uint64

func newRefusals() refusals {
	r := refusals{}
	for _, why := range names.WebRefusals {
		r[why] = &atomic.Uint64{}
	}
	return r
}

func (r refusals) count(why string) { r[why].Add(1) }

func (r refusals) all() map[string]uint64 {
	n := map[string]uint64{}
	for why, count := range r {
		n[why] = count.Load()
	}
	return n
}

// counted counts what h refuses for want of the right password, or by its limit. Tokens that are
// not the right ones are counted where tokens are asked for.
func (r refusals) counted(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		out := &response{ResponseWriter: w}
		h.ServeHTTP(out, req)
		switch _, _, basic := req.BasicAuth(); {
		case out.code == http.StatusTooManyRequests:
			r.count(names.WebLimited)
		case out.code == http.StatusUnauthorized && basic:
			r.count(names.WebPassword)
		case out.code == http.StatusUnauthorized && req.Header.Get("Authorization") == "":
			r.count(names.WebAnonymous)
		}
	})
}

// response remembers its status.
type response struct {
	http.ResponseWriter
	code int
}

func (a *response) WriteHeader(code int) {
	if a.code == 0 {
		a.code = code
	}
	a.ResponseWriter.WriteHeader(code)
}

// Unwrap lets http.ResponseController reach what is below.
func (a *response) Unwrap() http.ResponseWriter { return a.ResponseWriter }
