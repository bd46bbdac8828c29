package web

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"testing"
	"time"
)

// TestConnectionsAreBounded: who opens connections and lets them idle holds a bounded number,
// and keeps out neither those of another address nor newcomers of its own.
func TestConnectionsAreBounded(t *testing.T) {
	s, err := New(Options{Listen: "127.0.0.1:0", Title: "test", Metrics: http.NotFoundHandler()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended }) // after the connections' ends

	ask := func(c net.Conn) error {
		if _, err := c.Write([]byte("GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")); err != nil {
			return err
		}
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			err = r.Body.Close()
		}
		return err
	}
	dial := func(from string) net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.DialContext(ctx, "tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(time.Minute)) // less than the server lets one idle
		return c
	}
	honest, idle := dial("127.0.0.2"), dial("127.0.0.1")
	all := []net.Conn{honest, idle}
	for range maxConns {
		all = append(all, nil)
	}
	for i, c := range all { // one that has asked may idle
		if c == nil {
			c = dial("127.0.0.1")
		}
		if err := ask(c); err != nil {
			t.Fatalf("newcomer %d: %v", i, err)
		}
	}
	if _, err := idle.Read(make([]byte, 1)); err == nil {
		t.Error("an answer that nobody has asked for")
	} else if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Errorf("more than %d connections are held", maxConns)
	}
	if err := ask(honest); err != nil {
		t.Errorf("another address's connection: %v", err)
	}
}
