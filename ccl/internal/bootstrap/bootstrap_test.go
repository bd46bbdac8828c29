package bootstrap

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) {
	if os.Getenv("BOOTSTRAP_TEST_RANK") != "" {
		rankMain()
		return
	}
	if id := os.Getenv(floodEnv); id != "" {
		floodMain(id)
	}
	goleak.VerifyTestMain(m)
}

var secret = []byte("0123456789abcdef0123456789abcdef")

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // generous: the machine may be busy
	t.Cleanup(cancel)
	return ctx
}

// joinAll joins n ranks in this process. change edits each rank's Config first.
func joinAll(t testing.TB, ctx context.Context, n int, change func(*Config)) ([]*Control, []error) {
	t.Helper()
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	controls, errs := make([]*Control, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		cfg := Config{ID: id, Rank: r, Size: n, Secret: secret, Info: fmt.Appendf(nil, "rank %d", r)}
		if r == 0 {
			cfg.Listener = ln
		}
		if change != nil {
			change(&cfg)
		}
		wg.Go(func() { controls[r], errs[r] = Join(ctx, cfg) })
		for r > 8 && ctx.Err() == nil { // about 8 handshakes at a time, so that none times out
			if c := ln.route(id.Token); c != nil && n-len(c.missing().Ranks) > r-8 {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	wg.Wait()
	return controls, errs
}

func mustJoin(t testing.TB, n int) []*Control {
	t.Helper()
	controls, errs := joinAll(t, testContext(t), n, nil)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { leaveAll(controls) })
	return controls
}

func leaveAll(controls []*Control) {
	each(controls, func(c *Control) error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		return c.Leave(ctx)
	})
}

func each(controls []*Control, f func(*Control) error) error {
	errs := make([]error, len(controls))
	var wg sync.WaitGroup
	for i, c := range controls {
		if c != nil {
			wg.Go(func() { errs[i] = f(c) })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// next returns c's next event, nil if none comes in time.
func next(c *Control, within time.Duration) *Event {
	select {
	case e, ok := <-c.Events():
		if ok {
			return &e
		}
	case <-time.After(within):
	}
	return nil
}

func TestIDRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		host := rapid.SampledFrom([]string{"127.0.0.1", "::1", "node-7.cluster"}).Draw(t, "host")
		id := NewID(net.JoinHostPort(host, strconv.Itoa(rapid.IntRange(1, 65535).Draw(t, "port"))))
		back, err := ParseID(id.String())
		if err != nil || back != id {
			t.Fatalf("%v -> %v, %v", id, back, err)
		}
	})
	for _, s := range []string{"", "lockstep1:", "lockstep1:host:aa", "lockstep2:h:1:00112233445566778899aabbccddeeff", "lockstep1:h:1:0011", "lockstep1:h:1:" + strings.Repeat("g", 32)} {
		if id, err := ParseID(s); err == nil {
			t.Errorf("ParseID(%q) = %v, want an error", s, id)
		}
	}
}

func TestJoinAndGather(t *testing.T) {
	for _, n := range []int{1, 2, 9} {
		controls := mustJoin(t, n)
		err := each(controls, func(c *Control) error {
			for r, m := range c.Members() {
				if string(m.Info) != fmt.Sprintf("rank %d", r) {
					return fmt.Errorf("rank %d knows rank %d as %q", c.Rank(), r, m.Info)
				}
			}
			if !bytes.Equal(c.Key("x"), controls[0].Key("x")) || bytes.Equal(c.Key("x"), c.Key("y")) {
				return errors.New("keys are wrong")
			}
			for round := range 20 {
				blobs, err := c.AllGather(testContext(t), bytes.Repeat([]byte{byte(c.Rank()), byte(round)}, round*c.Rank()*100))
				if err != nil {
					return err
				}
				for r, b := range blobs {
					if !bytes.Equal(b, bytes.Repeat([]byte{byte(r), byte(round)}, round*r*100)) {
						return fmt.Errorf("round %d: wrong blob of rank %d", round, r)
					}
				}
			}
			if err := c.Barrier(testContext(t)); err != nil {
				return err
			}
			b, err := c.Broadcast(testContext(t), n-1, fmt.Appendf(nil, "from %d", c.Rank()))
			if err != nil || string(b) != fmt.Sprintf("from %d", n-1) {
				return fmt.Errorf("broadcast: %q, %w", b, err)
			}
			return nil
		})
		if err != nil {
			t.Fatalf("size %d: %v", n, err)
		}
	}
}

func TestSlowStarters(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	id := NewID(ln.Addr().String())
	ln.Close() // rank 0 listens there again, after the others have tried
	controls := make([]*Control, 3)
	var wg sync.WaitGroup
	for i, r := range []int{2, 1, 0} {
		wg.Go(func() {
			time.Sleep(time.Duration(i) * 150 * time.Millisecond)
			c, err := Join(testContext(t), Config{ID: id, Rank: r, Size: 3, Secret: secret})
			if err != nil {
				t.Error(err)
			}
			controls[r] = c
		})
	}
	wg.Wait()
	leaveAll(controls)
}

// held returns a listener that stays until the test's end, whoever leaves it, and an id of it.
func held(t *testing.T) (*Listener, ID) {
	t.Helper()
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id, hub := ln.NewID(), ln.hold()
	t.Cleanup(func() { hub.Close() })
	return ln, id
}

func TestMissingRanksAreNamed(t *testing.T) {
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	errs := make([]error, 6)
	ln, id := held(t)
	var wg sync.WaitGroup
	for _, r := range []int{0, 1, 3} {
		wg.Go(func() {
			cfg := Config{ID: id, Rank: r, Size: 6, Secret: secret}
			if r == 0 {
				cfg.Listener = ln
			}
			_, errs[r] = Join(ctx, cfg)
		})
	}
	for ctx.Err() == nil { // until ranks 1 and 3 have joined
		if c := ln.route(id.Token); c != nil && len(c.missing().Ranks) == 3 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	time.Sleep(500 * time.Millisecond) // and have been told who is missing
	cancel()
	wg.Wait()
	for _, r := range []int{0, 1, 3} {
		var m *MissingError
		if err := errs[r]; !errors.As(err, &m) || !errors.Is(err, ErrMissing) || fmt.Sprint(m.Ranks) != "[2 4 5]" {
			t.Errorf("rank %d: %v", r, err)
		} else if !strings.Contains(err.Error(), "3 of 6 ranks are missing: 2,4-5") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

func TestUnreachableRootIsNamed(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := Join(ctx, Config{ID: NewID("127.0.0.1:1"), Rank: 1, Size: 2, Secret: secret})
	var m *MissingError
	if !errors.As(err, &m) || fmt.Sprint(m.Ranks) != "[0]" || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

func TestConflictsFailEveryRank(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Config)
		want   error
		rank   int
	}{
		{"size", func(c *Config) {
			if c.Rank == 2 {
				c.Size = 7
			}
		}, ErrSize, 2},
		{"duplicate", func(c *Config) {
			if c.Rank == 3 {
				c.Rank = 1
			}
		}, ErrDuplicateRank, 1},
		{"second root", func(c *Config) {
			if c.Rank == 3 {
				c.Rank = 4
			}
		}, ErrRank, 4},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, errs := joinAll(t, testContext(t), 4, tc.change)
			for r, err := range errs {
				var e *ConflictError
				if !errors.As(err, &e) || !errors.Is(err, tc.want) || e.Rank != tc.rank {
					t.Errorf("rank %d: %v", r, err)
				}
			}
		})
	}
}

func TestVersionMismatchFailsEveryRank(t *testing.T) {
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for _, r := range []int{0, 1} {
		cfg := Config{ID: id, Rank: r, Size: 3, Secret: secret}
		if r == 0 {
			cfg.Listener = ln
		}
		wg.Go(func() { _, errs[r] = Join(testContext(t), cfg) })
	}
	wg.Go(func() { // rank 2 speaks a later version
		for errs[2] == nil {
			conn, err := net.Dial("tcp", id.Addr)
			if err != nil {
				errs[2] = err
				return
			}
			conn.SetDeadline(time.Now().Add(10 * time.Second))
			if err := clientHandshake(conn, secret, version+1, id.Token); err != nil {
				errs[2] = err
			}
			conn.Write(hello{rank: 2, size: 3}.encode())
			if f, fields, err := readFrame(conn, 1000); err != nil {
				errs[2] = err
			} else if f != frameRetry {
				errs[2] = decodeFailure(f, fields, 3)
			}
			conn.Close()
		}
	})
	wg.Wait()
	for r, err := range errs {
		var e *ConflictError
		if !errors.As(err, &e) || !errors.Is(err, ErrVersion) || e.Rank != 2 {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// TestMissingRanksAreCurrent: a rank that waits knows the ranks that are missing now, also when one has
// left and another has come between two ticks. It also knows that connections were rejected.
func TestMissingRanksAreCurrent(t *testing.T) {
	ln, id := held(t)
	var wg sync.WaitGroup
	defer wg.Wait()
	errs, ended := make([]error, 4), make([]chan struct{}, 4)
	join := func(r int) (leave func()) {
		ctx, cancel := context.WithCancel(testContext(t))
		ended[r] = make(chan struct{})
		wg.Go(func() {
			defer close(ended[r])
			cfg := Config{ID: id, Rank: r, Size: 4, Secret: secret}
			if r == 0 {
				cfg.Listener = ln
			}
			_, errs[r] = Join(ctx, cfg)
		})
		return cancel
	}
	until := func(missing string) {
		for ctx := testContext(t); ctx.Err() == nil; time.Sleep(time.Millisecond) {
			if c := ln.route(id.Token); c != nil && fmt.Sprint(c.missing().Ranks) == missing {
				return
			}
		}
		t.Fatalf("ranks %s are not missing", missing)
	}
	told := func() {
		c := ln.route(id.Token)
		for ctx, untold := testContext(t), true; untold && ctx.Err() == nil; time.Sleep(time.Millisecond) {
			c.mu.Lock()
			untold = c.untold
			c.mu.Unlock()
		}
	}
	defer join(0)()
	leave1, leave2 := join(1), join(2)
	until("[3]")
	told()
	leave2()
	until("[2 3]")
	defer join(3)()
	until("[2]")
	told()
	if _, err := Join(testContext(t), Config{ID: id, Rank: 2, Size: 4, Secret: []byte("another secret, as long as it is")}); !errors.Is(err, ErrSecret) {
		t.Fatal(err)
	}
	for ctx := testContext(t); ln.route(id.Token).missing().Rejected == 0 && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
	told()
	leave1()
	<-ended[1]
	var m *MissingError
	if !errors.As(errs[1], &m) || fmt.Sprint(m.Ranks) != "[2]" || m.Rejected != 1 || !errors.Is(errs[1], ErrSecret) {
		t.Errorf("rank 1: %v", errs[1])
	}
}

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

func TestAbortReachesEveryone(t *testing.T) {
	for _, from := range []int{0, 2} {
		controls := mustJoin(t, 4)
		pending := make(chan error, 1)
		go func() { pending <- controls[1].Barrier(testContext(t)) }()
		controls[from].Abort([]byte("count differs"))
		for r, c := range controls {
			if r == from {
				continue
			}
			e := next(c, time.Minute)
			var a *AbortError
			if e == nil || e.Kind != Aborted || e.Rank != from || !errors.As(e.Err, &a) || string(a.Reason) != "count differs" {
				t.Fatalf("rank %d: %+v", r, e)
			}
		}
		if err := <-pending; !errors.Is(err, ErrAborted) {
			t.Fatal(err)
		}
		if err := controls[from].Barrier(testContext(t)); !errors.Is(err, ErrAborted) {
			t.Fatal(err)
		}
	}
}

// TestNobodyIsMissing: tellMissing sends nothing once the rendezvous is complete.
func TestNobodyIsMissing(t *testing.T) {
	controls := mustJoin(t, 3)
	controls[0].mu.Lock()
	controls[0].untold = true
	controls[0].mu.Unlock()
	controls[0].tellMissing()
	if err := each(controls, func(c *Control) error { return c.Barrier(testContext(t)) }); err != nil {
		t.Error(err)
	}
}

func TestLeavingIsNotDying(t *testing.T) {
	controls := mustJoin(t, 3)
	if err := controls[1].Leave(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for _, r := range []int{0, 2} {
		if e := next(controls[r], time.Minute); e == nil || e.Kind != Left || e.Rank != 1 {
			t.Fatalf("rank %d: %+v", r, e)
		}
		if err := controls[r].Barrier(testContext(t)); !errors.Is(err, ErrLost) {
			t.Fatal(err)
		}
	}
	leaveAll(controls)
	for r, c := range controls {
		for e := range c.Events() {
			if e.Kind != Left {
				t.Errorf("rank %d: %+v", r, e)
			}
		}
	}
}

func TestRegroup(t *testing.T) {
	controls := mustJoin(t, 6)
	// Two halves, each in reverse order, that outlive their parent.
	groups := make([]*Control, 6)
	err := each(controls, func(c *Control) error {
		members := []int{4, 2, 0}
		if c.Rank()%2 == 1 {
			members = []int{5, 3, 1}
		}
		for i, m := range members {
			if m == c.Rank() {
				g, err := c.Regroup(testContext(t), members, i, "split")
				if err != nil {
					return err
				}
				groups[m] = g
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	leaveAll(controls)
	err = each(groups, func(g *Control) error {
		blobs, err := g.AllGather(testContext(t), g.Members()[g.Rank()].Info)
		if err != nil {
			return err
		}
		members := []int{4, 2, 0}
		if g.ID() != groups[0].ID() {
			members = []int{5, 3, 1}
		}
		for i, m := range members {
			if want := fmt.Sprintf("rank %d", m); string(blobs[i]) != want {
				return fmt.Errorf("new rank %d: %q, want %q", i, blobs[i], want)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if groups[0].ID() != groups[2].ID() || groups[0].ID().Token == groups[1].ID().Token {
		t.Error("group ids are wrong")
	}
	leaveAll(groups)
}

// TestRegroupNamesTheGone: when a listed member's process is gone, Regroup fails on all ranks long
// before the deadline.
func TestRegroupNamesTheGone(t *testing.T) {
	for _, gone := range []int{0, 2} {
		controls := mustJoin(t, 4)
		controls[gone].Close()
		members := []int{0, 1, 2, 3}
		err := each(controls, func(c *Control) error {
			if c.Rank() == gone {
				return nil
			}
			_, err := c.Regroup(testContext(t), members, c.Rank(), "x")
			var lost *LostError
			if !errors.As(err, &lost) || lost.Rank != gone {
				return fmt.Errorf("rank %d: %v", c.Rank(), err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		leaveAll(controls)
	}
}

func TestGrow(t *testing.T) {
	controls := mustJoin(t, 2)
	ln := controls[0].Listener()
	id := ln.NewID()
	grown := make([]*Control, 3)
	var wg sync.WaitGroup
	for r := range grown {
		cfg := Config{ID: id, Rank: r, Size: 3, Secret: secret}
		if r < 2 {
			cfg.Listener = ln
			if r == 1 {
				cfg.Listener = controls[1].Listener()
			}
		}
		wg.Go(func() {
			var err error
			if grown[r], err = Join(testContext(t), cfg); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := each(grown, func(c *Control) error { return c.Barrier(testContext(t)) }); err != nil {
		t.Fatal(err)
	}
	leaveAll(grown)
}

// ---- ranks that are processes ----

// rankMain is the main function of a rank's process. It prints its events and takes commands on
// stdin.
func rankMain() {
	rank, _ := strconv.Atoi(os.Getenv("BOOTSTRAP_TEST_RANK"))
	size, _ := strconv.Atoi(os.Getenv("BOOTSTRAP_TEST_SIZE"))
	id, err := ParseID(os.Getenv("BOOTSTRAP_TEST_ID"))
	if err != nil {
		fmt.Println("error", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	outage, _ := time.ParseDuration(os.Getenv("BOOTSTRAP_TEST_OUTAGE"))
	c, err := Join(ctx, Config{ID: id, Rank: rank, Size: size, Outage: outage})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println("joined")
	go func() {
		for e := range c.Events() {
			fmt.Println("event", e.Kind, e.Rank)
		}
	}()
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if in.Text() == "outage" {
			for !c.Seeking() {
				time.Sleep(time.Millisecond)
			}
			fmt.Println("outage")
			continue
		}
		var members []int
		for _, f := range strings.Fields(in.Text()) {
			m, _ := strconv.Atoi(f)
			members = append(members, m)
		}
		for i, m := range members {
			if m != rank {
				continue
			}
			g, err := c.Regroup(ctx, members, i, "again")
			if err == nil {
				err = g.Barrier(ctx)
			}
			fmt.Println("regrouped", err)
		}
	}
	c.Leave(ctx)
}

type process struct {
	cmd   *exec.Cmd
	in    *os.File
	lines chan string
}

func (p *process) expect(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-p.lines:
		if got != want {
			t.Fatalf("%s: got %q, want %q", p.cmd.Env[len(p.cmd.Env)-1], got, want)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%s: nothing, want %q", p.cmd.Env[len(p.cmd.Env)-1], want)
	}
}

func startProcesses(t *testing.T, n int) []*process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	id := NewID(ln.Addr().String())
	ln.Close()
	ps := make([]*process, n)
	for r := range ps {
		ps[r] = startProcess(t, id, path, r, n)
	}
	for _, p := range ps {
		p.expect(t, "joined")
	}
	return ps
}

// startProcess starts the process of rank r of n. secret is the path of the secret's file.
func startProcess(t *testing.T, id ID, secret string, r, n int) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), SecretEnv+"="+secret, "BOOTSTRAP_TEST_ID="+id.String(), fmt.Sprint("BOOTSTRAP_TEST_SIZE=", n), fmt.Sprint("BOOTSTRAP_TEST_RANK=", r))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	inR, inW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stderr = inR, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	inR.Close()
	p := &process{cmd, inW, make(chan string, 100)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	})
	t.Cleanup(func() { p.cmd.Process.Kill(); p.in.Close(); wg.Wait(); p.cmd.Wait() })
	return p
}

func TestKilledRankIsReportedToAll(t *testing.T) {
	for _, victim := range []int{0, 2} {
		ps := startProcesses(t, 4)
		start := time.Now()
		ps[victim].cmd.Process.Signal(syscall.SIGKILL)
		var rest []string
		for r, p := range ps {
			if r != victim {
				p.expect(t, fmt.Sprint("event ", Lost, " ", victim))
				rest = append(rest, strconv.Itoa(r))
			}
		}
		t.Logf("rank %d killed: all survivors knew after %v", victim, time.Since(start))
		// The survivors can regroup, whoever died.
		for r, p := range ps {
			if r != victim {
				fmt.Fprintln(p.in, strings.Join(rest, " "))
			}
		}
		for r, p := range ps {
			if r != victim {
				p.expect(t, "regrouped <nil>")
			}
		}
	}
}

// TestStoppedInAnOutage: the time in which a rank itself is stopped, or its machine frozen, does
// not count as its peer's silence.
func TestStoppedInAnOutage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("BOOTSTRAP_TEST_OUTAGE", "8s")
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	p := startProcess(t, id, path, 1, 2)
	hub, err := Join(testContext(t), Config{ID: id, Rank: 0, Size: 2, Secret: secret, Listener: ln})
	if err != nil {
		t.Fatal(err)
	}
	defer leaveAll([]*Control{hub})
	p.expect(t, "joined")
	mend := cut(t, []*Control{hub})
	fmt.Fprintln(p.in, "outage")
	p.expect(t, "outage")
	p.cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(6 * time.Second)
	mend()
	p.cmd.Process.Signal(syscall.SIGCONT)
	time.Sleep(time.Second) // a rank that counted it would report the loss at once
	fmt.Fprintln(p.in, "1 0")
	g, err := hub.Regroup(testContext(t), []int{1, 0}, 1, "again")
	if err != nil {
		t.Fatal(err)
	}
	defer leaveAll([]*Control{g})
	if err := g.Barrier(testContext(t)); err != nil {
		t.Error(err)
	}
	p.expect(t, "regrouped <nil>")
	if e := next(hub, 0); e != nil {
		t.Errorf("rank 0: %+v: %v", e, e.Err)
	}
	p.in.Close() // it leaves
}

func TestStoppedRankIsNotLost(t *testing.T) {
	ps := startProcesses(t, 3)
	for _, victim := range []int{0, 1} {
		ps[victim].cmd.Process.Signal(syscall.SIGSTOP)
	}
	time.Sleep(3500 * time.Millisecond) // longer than userTimeout
	for _, victim := range []int{0, 1} {
		ps[victim].cmd.Process.Signal(syscall.SIGCONT)
	}
	for _, p := range ps {
		fmt.Fprintln(p.in, "0 1 2")
	}
	for _, p := range ps {
		p.expect(t, "regrouped <nil>") // and no event before it
	}
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
