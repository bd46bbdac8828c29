package ccltest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// command is one line of the socket's protocol, JSON; the answer is a reply line.
type command struct {
	Op   string        `json:"op"`
	Comm string        `json:"comm,omitempty"`
	Src  int           `json:"src,omitempty"`
	Dst  int           `json:"dst,omitempty"`
	Rate int64         `json:"bytes_per_second,omitempty"`
	Wait time.Duration `json:"delay_ns,omitempty"`
}

type reply struct {
	Err string `json:"error,omitempty"`
}

const (
	maxLine  = 4096
	maxPeers = 16
)

// Serve lets other processes of the same user command inj by a Unix socket at
// path, mode 0600. A socket left there by a dead process is replaced. stop ends
// it, removes the socket and waits for its goroutines.
func Serve(path string, inj *Injector) (stop func(), err error) {
	_ = os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("fault injection: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("fault injection: %w", err), l.Close())
	}
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		conns = map[net.Conn]bool{}
	)
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if len(conns) >= maxPeers {
				c.Close()
				mu.Unlock()
				continue
			}
			conns[c] = true
			mu.Unlock()
			wg.Go(func() {
				obey(c, inj)
				c.Close()
				mu.Lock()
				delete(conns, c)
				mu.Unlock()
			})
		}
	})
	return func() {
		l.Close()
		mu.Lock()
		for c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	}, nil
}

func obey(c net.Conn, inj *Injector) {
	in := bufio.NewScanner(io.LimitReader(c, 1<<20))
	in.Buffer(make([]byte, 0, 512), maxLine)
	out := json.NewEncoder(c)
	for in.Scan() {
		var cmd command
		err := json.Unmarshal(in.Bytes(), &cmd)
		if err == nil {
			err = inj.do(cmd)
		}
		var r reply
		if err != nil {
			r.Err = err.Error()
		}
		if out.Encode(r) != nil {
			return
		}
	}
}

func (i *Injector) do(c command) error {
	switch c.Op {
	case "stall":
		i.Stall(c.Comm, c.Src, c.Dst)
	case "throttle":
		if c.Rate <= 0 {
			return fmt.Errorf("throttle to %d bytes/s: must be above 0", c.Rate)
		}
		i.Throttle(c.Comm, c.Src, c.Dst, c.Rate)
	case "delay":
		i.Delay(c.Comm, c.Src, c.Dst, c.Wait)
	case "drop":
		i.Drop(c.Comm, c.Src, c.Dst)
	case "delay_rank":
		i.DelayRank(c.Wait)
	case "clear":
		i.Clear()
	default:
		return fmt.Errorf("unknown fault %q", c.Op)
	}
	return nil
}

// Remote commands an Injector of another process; its methods are the
// Injector's. It is used by one goroutine at a time.
type Remote struct {
	c  net.Conn
	in *bufio.Reader
}

// Dial connects to what Serve serves.
func Dial(path string) (*Remote, error) {
	c, err := net.DialTimeout("unix", path, 5*time.Second)
	if err != nil {
		return nil, fmt.Errorf("fault injection: %w", err)
	}
	return &Remote{c, bufio.NewReaderSize(c, maxLine)}, nil
}

// Close ends the connection; faults stay.
func (r *Remote) Close() error { return r.c.Close() }

func (r *Remote) Stall(comm string, src, dst int) error {
	return r.call(command{Op: "stall", Comm: comm, Src: src, Dst: dst})
}

func (r *Remote) Throttle(comm string, src, dst int, bytesPerSecond int64) error {
	return r.call(command{Op: "throttle", Comm: comm, Src: src, Dst: dst, Rate: bytesPerSecond})
}

func (r *Remote) Delay(comm string, src, dst int, d time.Duration) error {
	return r.call(command{Op: "delay", Comm: comm, Src: src, Dst: dst, Wait: d})
}

func (r *Remote) Drop(comm string, src, dst int) error {
	return r.call(command{Op: "drop", Comm: comm, Src: src, Dst: dst})
}

func (r *Remote) DelayRank(d time.Duration) error {
	return r.call(command{Op: "delay_rank", Wait: d})
}

func (r *Remote) Clear() error { return r.call(command{Op: "clear"}) }

func (r *Remote) call(c command) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := r.c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return fmt.Errorf("fault injection: %s: %w", c.Op, err)
	}
	if _, err := r.c.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("fault injection: %s: %w", c.Op, err)
	}
	line, err := r.in.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("fault injection: %s: %w", c.Op, err)
	}
	var rep reply
	if err := json.Unmarshal(line, &rep); err != nil {
		return fmt.Errorf("fault injection: %s: answer: %w", c.Op, err)
	}
	if rep.Err != "" {
		return fmt.Errorf("fault injection: %s", rep.Err)
	}
	return nil
}
