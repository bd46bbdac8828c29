package symm

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// place is what a rank tells all others: where it listens, or why it does not.
type place struct {
	Socket string `json:"socket,omitempty"`
	Error  string `json:"error,omitempty"`
}

// connect makes g.conns: a rank dials the lower ones, which listen.
func (g *Group) connect(ctx context.Context) error {
	var ln *net.UnixListener
	var failed error
	if !g.cfg.Device.HandlePOSIX {
		failed = fmt.Errorf("GPU %d (%s) cannot export memory as a file descriptor", g.cfg.Device.Ordinal, g.cfg.Device.Name)
	} else {
		ln, failed = listen(g.cfg.Dir)
	}
	// A rank that cannot go on says so: the others need not wait for it.
	var own place
	if failed != nil {
		own.Error = failed.Error()
	} else {
		defer ln.Close() // removes the socket
		own.Socket = ln.Addr().String()
	}
	blob, err := json.Marshal(own)
	if err != nil {
		return err
	}
	blobs, err := g.cfg.Exchange(ctx, blob)
	if failed != nil {
		return failed
	}
	if err != nil {
		return fmt.Errorf("exchange of sockets: %w", err)
	}
	if len(blobs) != g.cfg.Size {
		return fmt.Errorf("exchange of sockets: %d answers from %d ranks", len(blobs), g.cfg.Size)
	}
	places := make([]place, len(blobs))
	for r, b := range blobs {
		if err := json.Unmarshal(b, &places[r]); err != nil {
			return &RankError{r, fmt.Errorf("its socket: %w", err)}
		}
		if places[r].Error != "" {
			return &RankError{r, errors.New(places[r].Error)}
		}
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var once sync.Once
	fail := func(e error) {
		once.Do(func() { err = e }) // what comes later, comes of this
		cancel()
	}
	wg.Go(func() {
		if err := g.accept(ctx, ln); err != nil {
			fail(err)
		}
	})
	for r := range g.cfg.Rank {
		wg.Go(func() {
			c, err := g.dial(ctx, r, places[r].Socket)
			if err != nil {
				fail(&RankError{r, err})
				return
			}
			g.conns[r] = c
		})
	}
	wg.Wait()
	if err == nil {
		err = ctx.Err() // it may have set deadlines on what is connected
	}
	return err
}

// listen makes a socket in a folder that only this user can enter.
func listen(dir string) (*net.UnixListener, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return nil, err
	}
	if s, ok := st.Sys().(*syscall.Stat_t); !ok || !st.IsDir() || st.Mode().Perm()&0o077 != 0 || int(s.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%s is %v: it must be a folder of this user that nobody else can enter (chmod 700)", dir, st.Mode())
	}
	var name [8]byte
	rand.Read(name[:])
	path := filepath.Join(dir, "symm-"+hex.EncodeToString(name[:]))
	if len(path) > 107 {
		return nil, fmt.Errorf("%s: %d bytes are too long for the path of a socket (107): choose a shorter folder", path, len(path))
	}
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
}

// handshake: hello (dialer, its rank, the other's, a nonce), challenge (a nonce,
// the listener's proof), proof (the dialer's).
const (
	magic     = "LSsymm1\n"
	nonceLen  = 32
	helloLen  = len(magic) + 4 + 4 + nonceLen
	answerLen = nonceLen + sha256.Size
)

func (g *Group) proof(side string, hello, nonce []byte) []byte {
	h := hmac.New(sha256.New, g.cfg.Key)
	h.Write([]byte("lockstep symm " + side))
	h.Write(hello)
	h.Write(nonce)
	return h.Sum(nil)
}

func (g *Group) dial(ctx context.Context, rank int, path string) (_ *net.UnixConn, err error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("%w (is it on this node?)", err)
	}
	c := nc.(*net.UnixConn)
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	defer bind(ctx, c)()
	if err := sameUser(c); err != nil {
		return nil, err
	}
	hello := make([]byte, helloLen)
	binary.LittleEndian.PutUint32(hello[copy(hello, magic):], uint32(g.cfg.Rank))
	binary.LittleEndian.PutUint32(hello[len(magic)+4:], uint32(rank))
	rand.Read(hello[helloLen-nonceLen:])
	if _, err := c.Write(hello); err != nil {
		return nil, err
	}
	answer, err := readExactly(c, answerLen)
	if err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	nonce := answer[:nonceLen]
	if !hmac.Equal(answer[nonceLen:], g.proof("listener", hello, nonce)) {
		return nil, errors.New("handshake: it does not know the key")
	}
	if _, err := c.Write(g.proof("dialer", hello, nonce)); err != nil {
		return nil, err
	}
	// Without this, a refusal would show in the first collective call only.
	if _, err := readExactly(c, 1); err != nil {
		return nil, fmt.Errorf("handshake: it refused this rank: %w", err)
	}
	return c, nil
}

// accept takes one connection from each higher rank. Strangers cost a refusal,
// not the join.
func (g *Group) accept(ctx context.Context, ln *net.UnixListener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	context.AfterFunc(ctx, func() { _ = ln.SetDeadline(time.Unix(1, 0)) }) // ends the loop below

	type came struct {
		rank int
		c    *net.UnixConn
		err  error
	}
	arrivals := make(chan came)
	wg.Go(func() {
		room := make(chan struct{}, 2*g.cfg.Size) // handshakes at a time
		for {
			c, err := ln.AcceptUnix()
			if err != nil {
				return // ctx ended, as it does when everyone is here
			}
			select {
			case room <- struct{}{}:
			case <-ctx.Done():
				c.Close()
				return
			}
			wg.Go(func() {
				defer func() { <-room }()
				rank, err := g.admit(ctx, c, g.cfg.Rank+1)
				if err != nil {
					c.Close()
				}
				select {
				case arrivals <- came{rank, c, err}:
				case <-ctx.Done():
					c.Close()
				}
			})
		}
	})
	missing := map[int]bool{}
	for r := g.cfg.Rank + 1; r < g.cfg.Size; r++ {
		missing[r] = true
	}
	var refused error
	for len(missing) > 0 {
		select {
		case a := <-arrivals:
			switch {
			case a.err != nil:
				refused = a.err
			case !missing[a.rank]:
				a.c.Close()
			default:
				delete(missing, a.rank)
				g.conns[a.rank] = a.c
			}
		case <-ctx.Done():
			var ranks []int
			for r := g.cfg.Rank + 1; r < g.cfg.Size; r++ {
				if missing[r] {
					ranks = append(ranks, r)
				}
			}
			err := fmt.Errorf("ranks %v did not connect: %w", ranks, context.Cause(ctx))
			if refused != nil {
				err = fmt.Errorf("%w (last refused: %w)", err, refused)
			}
			return err
		}
	}
	return nil
}

// admit is the listener's side of the handshake, with a rank from least on.
func (g *Group) admit(ctx context.Context, c *net.UnixConn, least int) (rank int, err error) {
	defer bind(ctx, c)()
	if err := sameUser(c); err != nil {
		return 0, err
	}
	hello, err := readExactly(c, helloLen)
	if err != nil {
		return 0, err
	}
	from, to := binary.LittleEndian.Uint32(hello[len(magic):]), binary.LittleEndian.Uint32(hello[len(magic)+4:])
	if string(hello[:len(magic)]) != magic || int64(to) != int64(g.cfg.Rank) || int64(from) < int64(least) || int64(from) >= int64(g.cfg.Size) {
		return 0, errors.New("a connection that is not of this group")
	}
	answer := make([]byte, nonceLen, answerLen)
	rand.Read(answer)
	nonce := answer[:nonceLen:nonceLen]
	if _, err := c.Write(append(answer, g.proof("listener", hello, nonce)...)); err != nil {
		return 0, &RankError{int(from), err}
	}
	proof, err := readExactly(c, sha256.Size)
	if err != nil {
		return 0, &RankError{int(from), err}
	}
	if !hmac.Equal(proof, g.proof("dialer", hello, nonce)) {
		return 0, &RankError{int(from), errors.New("it does not know the key")}
	}
	_, err = c.Write([]byte{1})
	return int(from), err
}

// bind lets ctx end c's waits until the result is called.
func bind(ctx context.Context, c *net.UnixConn) (release func()) {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	return func() { stop() }
}

// readExactly reads one message of n bytes.
func readExactly(c *net.UnixConn, n int) ([]byte, error) {
	b := make([]byte, n+1)
	got, err := c.Read(b)
	switch {
	case err != nil:
		return nil, err
	case got != n:
		return nil, fmt.Errorf("%d bytes instead of %d", got, n)
	}
	return b[:n], nil
}

// sameUser refuses a peer process of another user.
func sameUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if credErr != nil {
		return fmt.Errorf("credentials of the peer: %w", credErr)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("process %d is of user %d, this one of %d", cred.Pid, cred.Uid, os.Geteuid())
	}
	return nil
}
