package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// TestMismatch: ranks that disagree on a call all learn it, whatever messages
// the two calls would have exchanged.
func TestMismatch(t *testing.T) {
	type call func(c *ccl.Comm, s *ccl.Stream) error
	allReduce := func(n int, op ccl.Op) call {
		return func(c *ccl.Comm, s *ccl.Stream) error {
			x := ccl.Of(make([]float32, n))
			return c.AllReduce(s, x, x, op)
		}
	}
	ints := func(c *ccl.Comm, s *ccl.Stream) error {
		x := ccl.Of(make([]int32, 10))
		return c.AllReduce(s, x, x, ccl.Sum)
	}
	broadcast := func(root int) call {
		return func(c *ccl.Comm, s *ccl.Stream) error {
			x := ccl.Of(make([]float32, 10))
			return c.Broadcast(s, x, x, root)
		}
	}
	large := func(root int) call {
		return func(c *ccl.Comm, s *ccl.Stream) error {
			x := ccl.Of(make([]float32, 1_000_000))
			return c.Broadcast(s, x, x, root)
		}
	}
	barrier := func(c *ccl.Comm, s *ccl.Stream) error { return c.Barrier(s) }
	for name, calls := range map[string][2]call{
		"count":           {allReduce(10, ccl.Sum), allReduce(11, ccl.Sum)},
		"protocol":        {allReduce(10, ccl.Sum), allReduce(100_000, ccl.Sum)},
		"operator":        {allReduce(10, ccl.Sum), allReduce(10, ccl.Max)},
		"large operator":  {allReduce(100_000, ccl.Sum), allReduce(100_000, ccl.Max)},
		"type":            {allReduce(10, ccl.Sum), ints},
		"collective":      {allReduce(10, ccl.Sum), broadcast(0)},
		"root":            {broadcast(0), broadcast(1)},
		"large root":      {large(0), large(1)},
		"barrier":         {barrier, allReduce(10, ccl.Sum)},
		"nothing or some": {allReduce(0, ccl.Sum), allReduce(10, ccl.Sum)},
	} {
		for _, n := range []int{2, 3} {
			for _, place := range []struct {
				name string
				per  int
			}{{"shm", n}, {"tcp", 1}} {
				t.Run(fmt.Sprintf("%s/%d/%s", name, n, place.name), func(t *testing.T) {
					t.Parallel()
					ranks(t, n, nodes(place.per), func(ctx context.Context, c *ccl.Comm) error {
						s := c.NewStream()
						call := calls[0]
						if c.Rank() == n-1 {
							call = calls[1]
						}
						begun := time.Now()
						err := do(ctx, s, call(c, s))
						if err == nil {
							// This rank's part went through; the disagreement shows
							// in the next call at the latest.
							err = do(ctx, s, c.Barrier(s))
						}
						if err := wantError(c, err, ccl.ErrMismatch, begun); err != nil {
							return err
						}
						return errExpected
					})
				})
			}
		}
	}
}

// errExpected ends a rank's body when all went as it should and Close is to
// report the failure again.
var errExpected = errors.New("as expected")

// wantError checks a failure against what every surviving rank is promised.
func wantError(c *ccl.Comm, err, sentinel error, begun time.Time) error {
	var e *ccl.Error
	switch took := time.Since(begun); {
	case !errors.Is(err, sentinel):
		return fmt.Errorf("want %v, got %v", sentinel, err)
	case !errors.As(err, &e):
		return fmt.Errorf("%v is no *Error", err)
	case e.Comm != c.Name() || e.Rank != c.Rank():
		return fmt.Errorf("%+v names another rank or communicator than %d of %s", e, c.Rank(), c.Name())
	case e.Seq == 0 && e.Op == "Wait":
		return fmt.Errorf("%+v names no operation", e)
	case took > 20*time.Second: // a bound, the goal is 2 s
		return fmt.Errorf("it took %v", took)
	}
	return nil
}

func TestAbort(t *testing.T) {
	why := errors.New("enough")
	ranks(t, 3, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		x := ccl.Of(make([]float32, 10))
		begun := time.Now()
		if c.Rank() == 1 {
			c.Abort(why)
		} else if err := wantError(c, do(ctx, s, c.AllReduce(s, x, x, ccl.Sum)), ccl.ErrAborted, begun); err != nil {
			return err
		}
		err := c.AllReduce(s, x, x, ccl.Sum)
		if c.Rank() == 1 && !errors.Is(err, why) {
			return fmt.Errorf("want the reason, got %w", err)
		}
		if err := wantError(c, err, ccl.ErrAborted, begun); err != nil {
			return err
		}
		return errExpected
	})
}

func TestInvalid(t *testing.T) {
	ranks(t, 2, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		f, i := ccl.Of(make([]float32, 4)), ccl.Of(make([]int32, 4))
		whole := make([]float32, 8)
		for what, err := range map[string]error{
			"types":       c.AllReduce(s, f, i, ccl.Sum),
			"counts":      c.AllReduce(s, f, f.Slice(0, 3), ccl.Sum),
			"operator":    c.AllReduce(s, f, f, 99),
			"overlap":     c.AllReduce(s, ccl.Of(whole[:4]), ccl.Of(whole[2:6]), ccl.Sum),
			"root":        c.Broadcast(s, f, f, 2),
			"negative":    c.Reduce(s, f, f, ccl.Sum, -1),
			"gather size": c.AllGather(s, f, f),
			"parts":       c.AlltoAll(s, f.Slice(0, 3), i.Slice(0, 3)),
			"self":        c.Send(s, f, c.Rank()),
			"peer":        c.Recv(s, f, 2),
			"vector":      c.AlltoAllv(s, f, []int{3, 3}, []int{0, 2}, f, []int{1, 1}, []int{0, 1}),
			"group": c.Group(s, func(g *ccl.Group) error {
				g.Send(f, c.Rank()) // nobody receives it
				return nil
			}),
		} {
			var e *ccl.Error
			if !errors.Is(err, ccl.ErrInvalid) || !errors.As(err, &e) {
				return fmt.Errorf("%s: want ErrInvalid, got %v", what, err)
			}
		}
		return do(ctx, s, c.Barrier(s)) // still in order
	})
}

func TestInitContradictions(t *testing.T) {
	id := freeID(t)
	results := make(chan error, 2)
	for r, size := range []int{2, 3} {
		go func() {
			c, err := ccl.Init(context.Background(), ccl.Config{ID: id, Rank: r, Size: size, Secret: secret, Timeout: 20 * time.Second})
			c.Close()
			results <- err
		}()
	}
	for range 2 {
		var e *ccl.Error
		if err := <-results; !errors.Is(err, ccl.ErrMismatch) || !errors.As(err, &e) {
			t.Errorf("want a mismatch, got %v", err)
		}
	}
	_, err := ccl.Init(context.Background(), ccl.Config{ID: freeID(t), Rank: 0, Size: 2, Secret: secret, Timeout: 100 * time.Millisecond})
	if !errors.Is(err, ccl.ErrTimeout) || !strings.Contains(err.Error(), "missing: 1") {
		t.Errorf("want a timeout that names rank 1, got %v", err)
	}
}

// A child process is one rank: TestMain runs childMain there.
const childEnv = "CCL_TEST_CHILD"

func childMain(role string) int {
	run := child
	if role == gpuCopiesRole {
		run = func(string) error { return gpuCopies() }
	} else if role == gpuQueuesRole {
		run = func(string) error { return gpuQueues() }
	} else if role == gpuAloneRole {
		run = func(string) error { return gpuAlone() }
	} else if strings.HasPrefix(role, "gpu groups ") {
		run = groupsChild
	} else if strings.HasPrefix(role, "gpu ") {
		run = gpuChild
	} else if role == "outage" {
		run = func(string) error { return outageChild() }
	}
	if err := run(role); err != nil {
		fmt.Println("ERROR", err)
		return 1
	}
	return 0
}

// initFromEnv is a rank by this process's environment; prepare may change that. The caller closes the
// recorder.
func initFromEnv(ctx context.Context, prepare func(*ccl.Config)) (*ccl.Comm, ccl.Config, error) {
	cfg, err := ccl.ConfigFromEnv()
	if err == nil {
		err = cfg.Prepare()
	}
	if err != nil {
		return nil, cfg, err
	}
	cfg.Secret = secret
	if prepare != nil {
		prepare(&cfg)
	}
	c, err := ccl.Init(ctx, cfg)
	if err != nil {
		cfg.Recorder.Close()
	}
	return c, cfg, err
}

// child is a rank of TestPeerLost. It says "ready" once it has finished a
// collective, and then the error of the collective that cannot finish.
func child(role string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, cfg, err := initFromEnv(ctx, nil)
	if err != nil {
		return err
	}
	defer cfg.Recorder.Close()
	s := c.NewStream()
	if err := do(ctx, s, c.Barrier(s)); err != nil {
		return err
	}
	fmt.Println("ready")
	if role == "victim" {
		select {} // until killed
	}
	if role == "closer" {
		x := make([]float32, 100_000)
		err = c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum)
		fmt.Println("closing")
		var e *ccl.Error
		if err = errors.Join(err, c.Close()); !errors.Is(err, ccl.ErrPeerLost) || !errors.As(err, &e) {
			return fmt.Errorf("Close, while a peer died: %w", err)
		}
		fmt.Println("lost", e.Peer)
		return nil
	}
	io.ReadFull(os.Stdin, make([]byte, 1)) // the victim is dead
	begun := time.Now()
	x := ccl.Of(make([]float32, 100_000))
	for err == nil {
		err = do(ctx, s, c.AllReduce(s, x, x, ccl.Sum))
	}
	if e := wantError(c, err, ccl.ErrPeerLost, begun); e != nil {
		return e
	}
	var e *ccl.Error
	errors.As(err, &e)
	fmt.Println("lost", e.Peer)
	// The survivors go on without it.
	small, err := c.Shrink(ctx, []int{e.Peer}, ccl.ShrinkAbort, "rest")
	if err != nil {
		return err
	}
	one := []int64{1}
	s = small.NewStream()
	if err := do(ctx, s, small.AllReduce(s, ccl.Of(one), ccl.Of(one), ccl.Sum)); err != nil {
		return err
	}
	fmt.Println("sum", one[0])
	if err := small.Close(); err != nil {
		return err
	}
	if err := c.Close(); !errors.Is(err, ccl.ErrPeerLost) {
		return fmt.Errorf("Close returns %v", err)
	}
	return nil
}

// TestPeerLost kills a rank's process and checks that every other rank gets an
// error that names it, and that they can go on together.
func TestPeerLost(t *testing.T) {
	for _, place := range []struct {
		name string
		per  int
	}{{"shm", 3}, {"tcp", 1}} {
		for victim := range 3 {
			t.Run(fmt.Sprintf("%s/rank %d", place.name, victim), func(t *testing.T) {
				t.Parallel()
				peerLost(t, 3, victim, place.per)
			})
		}
	}
}

type rankProcess struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string
}

func startRank(t *testing.T, id ccl.UniqueID, rank, size, per int, role string, env ...string) *rankProcess {
	t.Helper()
	return startRankIn(t, nil, id, rank, size, per, role, env...)
}

// startRankIn starts a rank by way of a command.
func startRankIn(t *testing.T, by []string, id ccl.UniqueID, rank, size, per int, role string, env ...string) *rankProcess {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	by = append(slices.Clone(by), exe)
	p := &rankProcess{cmd: exec.Command(by[0], by[1:]...), lines: make(chan string, 100)}
	p.cmd.Env = append(os.Environ(), childEnv+"="+role, "LOCKSTEP_COMM_ID="+id.String(),
		"LOCKSTEP_RANK="+strconv.Itoa(rank), "LOCKSTEP_WORLD_SIZE="+strconv.Itoa(size),
		"LOCKSTEP_NODE=node"+strconv.Itoa(rank/per), "LOCKSTEP_RUNTIME_DIR="+os.Getenv("LOCKSTEP_RUNTIME_DIR"))
	p.cmd.Env = append(p.cmd.Env, env...)
	p.cmd.Stderr = os.Stderr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(p.lines)
		b, buf := "", make([]byte, 4096)
		for {
			n, err := stdout.Read(buf)
			b += string(buf[:n])
			for {
				line, rest, ok := strings.Cut(b, "\n")
				if !ok {
					break
				}
				p.lines <- line
				b = rest
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		if t.Failed() { // where it hangs, if it does
			p.cmd.Process.Signal(syscall.SIGQUIT)
			select {
			case <-done:
			case <-time.After(5 * time.Second):
			}
		}
		p.cmd.Process.Kill()
		<-done
		p.cmd.Wait()
	})
	return p
}

// expect reads the process's next line.
func (p *rankProcess) expect(t *testing.T, rank int, want string) {
	t.Helper()
	select {
	case got := <-p.lines:
		if got != want {
			t.Errorf("rank %d says %q, want %q", rank, got, want)
		}
	case <-time.After(patience):
		t.Fatalf("rank %d says nothing, want %q", rank, want)
	}
}

func peerLost(t *testing.T, n, victim, per int) {
	id := freeID(t)
	var ps []*rankProcess
	for r := range n {
		role := "survivor"
		if r == victim {
			role = "victim"
		}
		ps = append(ps, startRank(t, id, r, n, per, role))
	}
	for r, p := range ps {
		p.expect(t, r, "ready")
	}
	ps[victim].cmd.Process.Kill()
	for r, p := range ps {
		if r != victim {
			p.stdin.Write([]byte{1})
		}
	}
	for r, p := range ps {
		if r == victim {
			continue
		}
		p.expect(t, r, fmt.Sprintf("lost %d", victim))
		p.expect(t, r, fmt.Sprintf("sum %d", n-1))
	}
	for r, p := range ps {
		if r != victim {
			for line := range p.lines {
				t.Errorf("rank %d also says %q", r, line)
			}
		}
	}
}
