package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// clientHello is what a TLS client says first.
func clientHello() []byte {
	here, there := net.Pipe()
	defer here.Close()
	go func() {
		defer there.Close()
		_ = tls.Client(there, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}).Handshake() // nobody answers
	}()
	head := make([]byte, 5)
	_, _ = io.ReadFull(here, head)
	body := make([]byte, int(head[3])<<8|int(head[4]))
	_, _ = io.ReadFull(here, body)
	return append(head, body...)
}

// slowlyAndHalf plays those who begin, and do not go on, from several addresses and many from one: a byte of a TLS
// hello now and then, a hello and nothing after the answer, HTTP/2's preface and silence, half a request, and connections
// of which one half is closed. Whoever is hung up on comes again. An agent comes anew meanwhile, and pages are asked for.
func slowlyAndHalf(t *testing.T, w *town) {
	hello := clientHello()
	kinds := []func(c *net.TCPConn, age int){
		func(c *net.TCPConn, age int) { _, _ = c.Write(hello[age%len(hello):][:1]) },
		func(c *net.TCPConn, age int) {
			if age == 0 {
				_, _ = c.Write(hello)
			}
		},
		func(c *net.TCPConn, age int) {
			if age == 0 {
				_, _ = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
			}
		},
		func(c *net.TCPConn, age int) {
			if age == 0 {
				_, _ = c.Write([]byte("GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "))
			} else {
				_, _ = c.Write([]byte("x"))
			}
		},
		func(c *net.TCPConn, age int) {
			if age == 0 {
				_, _ = c.Write(hello[:20])
				_ = c.CloseWrite()
			}
		},
		func(c *net.TCPConn, age int) {
			if age == 0 {
				_, _ = c.Write([]byte("GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
				_ = c.CloseWrite() // and does not read what is answered
			}
		},
	}
	targets := []string{w.grpc, w.web, w.rem, w.agents[0]}
	before := metric(t, w.web, names.MasterHandshakes)
	stop := make(chan struct{})
	var all sync.WaitGroup
	for hand := range 4 {
		all.Go(func() {
			from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(fmt.Sprint("127.0.0.", 40+hand*(hand%2)))}, Timeout: bound} // two are one host
			begin := func(is, n int) {
				at := targets[n%len(targets)]
				var c *net.TCPConn
				defer func() {
					if c != nil {
						c.Close()
					}
				}()
				for age := 0; ; age++ {
					if c != nil {
						_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
						if _, err := c.Read(make([]byte, 1)); err != nil && !isTimeout(err) {
							c.Close()
							c = nil
						}
					}
					if c == nil {
						if conn, err := from.Dial("tcp", at); err == nil {
							c, age = conn.(*net.TCPConn), 0
						}
					}
					if c != nil {
						kinds[is](c, age)
					}
					select {
					case <-stop:
						return
					case <-time.After(time.Second):
					}
				}
			}
			var hands sync.WaitGroup
			for n := range 600 {
				hands.Go(func() { begin(n/len(targets)%len(kinds), n) })
				time.Sleep(time.Millisecond)
			}
			hands.Wait()
		})
	}
	defer all.Wait()
	defer close(stop)
	time.Sleep(2 * time.Second) // all of them are at it
	w.again(t, "node1", nil)
	w.healthy(t)
	for _, addr := range targets[1:] {
		eventually(t, "answered", func() error { return w.get(addr+"/metrics", "", nil) })
	}
	grows(t, w.web, names.MasterHandshakes, before) // by those that do not go on
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}
