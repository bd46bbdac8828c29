package web

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// A page for this host only is for who is on it, and asks for it by address.
func TestLocalPages(t *testing.T) {
	s := &Server{refused: newRefusals()}
	h := s.local(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	for _, c := range []struct {
		from, host string
		code       int
	}{
		{"127.0.0.1:1000", "127.0.0.1:9402", http.StatusNoContent},
		{"[::1]:1000", "[::1]:9402", http.StatusNoContent},
		{"127.0.0.1:1000", "localhost:9402", http.StatusNoContent},
		{"10.0.0.1:1000", "127.0.0.1:9402", http.StatusForbidden},
		{"127.0.0.1:1000", "rebound.example:9402", http.StatusForbidden},
		{"127.0.0.1:1000", "", http.StatusForbidden},
	} {
		req := httptest.NewRequest(http.MethodGet, "/status", nil)
		req = req.WithContext(context.WithValue(req.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}))
		req.RemoteAddr, req.Host = c.from, c.host
		w := httptest.NewRecorder()
		h(w, req)
		if w.Code != c.code {
			t.Errorf("from %s to %q: %d, want %d", c.from, c.host, w.Code, c.code)
		}
	}
	if n := s.Refused()[names.WebElsewhere]; n != 3 {
		t.Errorf("%d requests are counted as refused, want 3", n)
	}
}
