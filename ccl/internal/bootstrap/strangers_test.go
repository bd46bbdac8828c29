package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
)

func TestWrongSecret(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, errs := joinAll(t, ctx, 3, func(c *Config) {
		if c.Rank == 2 {
			c.Secret = []byte("another secret, as long as it is")
		}
	})
	for r, err := range errs {
		if !errors.Is(err, ErrSecret) {
			t.Errorf("rank %d: %v", r, err)
		}
		if strings.Contains(err.Error(), string(secret)) {
			t.Errorf("rank %d: the error shows the secret", r)
		}
	}
	var m *MissingError
	if !errors.As(errs[0], &m) || fmt.Sprint(m.Ranks) != "[2]" {
		t.Errorf("rank 0: %v", errs[0])
	}
}

// TestWrongSecretBeforeRankZero: rank 0 reports a rank with a wrong secret that gave up before rank
// 0 began.
func TestWrongSecretBeforeRankZero(t *testing.T) {
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	other := []byte("another secret, as long as it is")
	for range maxEarly + 1 { // rejections of other rendezvous must not count
		if _, err := Join(testContext(t), Config{ID: ln.NewID(), Rank: 1, Size: 2, Secret: other}); !errors.Is(err, ErrSecret) {
			t.Fatal(err)
		}
	}
	if _, err := Join(testContext(t), Config{ID: id, Rank: 1, Size: 2, Secret: other}); !errors.Is(err, ErrSecret) {
		t.Fatal(err)
	}
	for ln.Refused().Refused[accept.Unproved] < maxEarly+2 {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(testContext(t), 200*time.Millisecond)
	defer cancel()
	_, err = Join(ctx, Config{ID: id, Rank: 0, Size: 2, Secret: secret, Listener: ln})
	var m *MissingError
	if !errors.As(err, &m) || m.Rejected != 1 {
		t.Errorf("%v", err)
	}
}

func TestGarbageDoesNotDisturbRendezvous(t *testing.T) {
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	controls := make([]*Control, 2)
	var wg sync.WaitGroup
	wg.Go(func() {
		controls[0], err = Join(testContext(t), Config{ID: id, Rank: 0, Size: 2, Secret: secret, Listener: ln})
		if err != nil {
			t.Error(err)
		}
	})
	for i := range 20 {
		conn, err := net.Dial("tcp", id.Addr)
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(bytes.Repeat([]byte{byte(i)}, i*17))
		conn.Close()
	}
	wg.Go(func() {
		controls[1], _ = Join(testContext(t), Config{ID: id, Rank: 1, Size: 2, Secret: secret})
	})
	wg.Wait()
	leaveAll(controls)
}

// FuzzServer feeds arbitrary bytes to a listener's connection, with and without a
// valid proof in front, to the sessions of a hub and of a member, and to the decoders.
func FuzzServer(f *testing.F) {
	f.Add(byte(0), []byte(magic))
	f.Add(byte(1), hello{rank: 1, size: 2, addr: "127.0.0.1:1"}.encode())
	f.Add(byte(2), seal(appendBytes(appendU64(frame(frameGather), 0), "blob")))
	f.Add(byte(3), encodeAbort(&AbortError{Rank: 1, Reason: []byte("why")}))
	f.Add(byte(4), encodeFailure(&MissingError{Ranks: []int{1}, Size: 3}))
	f.Add(byte(4), encodeRoster(make([]Member, 3), 7))
	f.Add(byte(1), wanted{rank: 0, from: 1, got: 3}.encode(frameResume))
	f.Add(byte(1), wanted{rank: 1}.encode(frameProbe))
	f.Add(byte(3), seal(appendU64(frame(frameAck), 1)))
	f.Fuzz(func(t *testing.T, mode byte, data []byte) {
		ln := &Listener{secret: secret, routes: map[[16]byte]*Control{}}
		c := newControl(Config{Size: 3, Rank: 0, Secret: secret})
		ln.routes[c.id.Token] = c
		ours, theirs := net.Pipe()
		defer ours.Close()
		done := make(chan struct{})
		switch mode % 5 {
		case 0, 1:
			go func() { defer close(done); ln.serve(accept.Wrap(theirs)) }()
			if mode%5 == 1 {
				ours.SetDeadline(time.Now().Add(5 * time.Second))
				if err := clientHandshake(ours, secret, version, c.id.Token); err != nil {
					t.Fatal(err)
				}
			}
		case 2, 3:
			c.state = stateJoined
			r := 1
			if mode%5 == 3 {
				c.rank, r = 2, 0
			}
			c.mu.Lock()
			c.patience = 1 // no peer ever answers
			c.admit(theirs, r, 0, 0)
			c.mu.Unlock()
			close(done)
		case 4:
			for in := bytes.NewReader(data); ; {
				ty, fields, err := readFrame(in, maxFrame)
				if err != nil {
					return
				}
				decodeRoster(fields, 3)
				decodeFailure(ty, fields, 3)
			}
		}
		go func() {
			buf := make([]byte, 1024)
			for {
				if _, err := ours.Read(buf); err != nil {
					return
				}
			}
		}()
		ours.SetWriteDeadline(time.Now().Add(5 * time.Second))
		ours.Write(data)
		ours.Close()
		<-done
		c.Close()
	})
}
