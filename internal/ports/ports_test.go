package ports

import (
	"net"
	"slices"
	"testing"
)

// TestHeld: who takes any port gets none that is held, and who knows one listens on it, again and again.
func TestHeld(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "localhost", "::1"} {
		held, err := Hold(host, 100)
		if host == "::1" && err != nil {
			t.Log("no IPv6 here:", err)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := len(slices.Compact(slices.Sorted(slices.Values(held.Addrs)))); n != 100 {
			t.Errorf("%s: %d addresses", host, n)
		}
		var others []net.Listener
		for range 500 {
			l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
			if err != nil {
				t.Fatal(err)
			}
			others = append(others, l)
			if slices.Contains(held.Addrs, l.Addr().String()) {
				t.Fatalf("%s is held, and given to another one", l.Addr())
			}
		}
		for _, l := range others {
			l.Close()
		}
		for range 2 {
			l, err := net.Listen("tcp", held.Addrs[0])
			if err != nil {
				t.Fatal(err)
			}
			if _, err := net.Listen("tcp", held.Addrs[0]); err == nil {
				t.Error("two listen on one address")
			}
			c, err := net.Dial("tcp", held.Addrs[0])
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			l.Close()
		}
		l, err := net.Listen("tcp", held.Addrs[1])
		if err != nil {
			t.Fatal(err)
		}
		if err := held.Close(); err != nil {
			t.Error(err)
		}
		if c, err := net.Dial("tcp", l.Addr().String()); err != nil {
			t.Error(err)
		} else {
			c.Close()
		}
		l.Close()
	}
	if _, err := Hold("no host's name", 1); err == nil {
		t.Error("held")
	}
	if _, err := Hold("192.0.2.1", 1); err == nil {
		t.Error("held at an address of another machine")
	}
}
