package main

import (
	"io"
	"net"
	"testing"
	"time"
)

// newTestWire joins two nodes, or skips where that is not permitted.
func newTestWire(t *testing.T) (w *wire, a, b *port) {
	t.Helper()
	w = newWire()
	var err error
	if a, err = w.add(0); err == nil {
		b, err = w.add(1)
	}
	if err != nil {
		w.stop()
		t.Skip("no network namespaces here: ", err)
	}
	w.start()
	t.Cleanup(w.stop)
	return w, a, b
}

// connect returns both ends of a connection from a to b.
func connect(t *testing.T, a, b *port) (from, to net.Conn) {
	t.Helper()
	var l net.Listener
	if err := b.within(func() (err error) {
		l, err = net.Listen("tcp", b.addr.String()+":7000")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			accepted <- c
		}
		close(accepted)
	}()
	if err := a.within(func() (err error) {
		from, err = net.DialTimeout("tcp", b.addr.String()+":7000", 10*time.Second)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	to = <-accepted
	if to == nil {
		t.Fatal("nobody was accepted")
	}
	t.Cleanup(func() { from.Close(); to.Close() })
	return from, to
}

func TestWire(t *testing.T) {
	w, a, b := newTestWire(t)
	from, to := connect(t, a, b)
	send := func() {
		t.Helper()
		if _, err := from.Write(make([]byte, 20000)); err != nil {
			t.Fatal(err)
		}
	}
	receive := func() {
		t.Helper()
		_ = to.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.ReadFull(to, make([]byte, 20000)); err != nil {
			t.Fatal(err)
		}
	}
	send()
	receive()
	key := [2]int{a.index, b.index}
	if n := w.bytes()[key]; n < 20000 {
		t.Errorf("%d bytes were counted of 20000", n)
	}
	for _, tc := range []struct {
		name string
		set  func(*ruleset)
	}{
		{"loss", func(s *ruleset) { s.path[key] = rule{drop: 0.2} }},
		{"delay", func(s *ruleset) { s.path[key] = rule{delay: 5 * time.Millisecond} }},
		{"rate", func(s *ruleset) { s.node[1] = rule{rate: 200e3} }},
		{"none", func(*ruleset) {}},
	} {
		w.set(tc.set)
		send()
		receive()
		t.Log(tc.name, "carried 20000 bytes")
	}
	w.set(func(s *ruleset) { s.node[0] = rule{drop: 1} })
	before := w.bytes()[key]
	send()
	for w.bytes()[key] == before { // it has tried
		time.Sleep(time.Millisecond)
	}
	_ = to.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, err := to.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes crossed a node's edge that is cut", n)
	}
	w.set(func(*ruleset) {})
	receive()
}
