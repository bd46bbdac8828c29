package symm

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if os.Getenv("SYMM_TEST_CHILD") != "" {
		if err := child(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	stop, err := cudatest.Start(cudatest.Options{GPUs: 4})
	if err != nil && !errors.Is(err, cudatest.ErrUnavailable) {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) { stop(); os.Exit(code) }))
}

func TestAlloc(t *testing.T) {
	gs := join(t, 4)
	allocate(t, gs, 1)
	before := openFiles(t)
	allocate(t, gs, 3<<20)
	allocate(t, gs, 2<<20)
	if n := openFiles(t); n != before {
		t.Errorf("%d open files, %d before", n, before)
	}
}

func TestAlone(t *testing.T) {
	g, err := Join(t.Context(), Config{Device: cudatest.Device(t, 0), Size: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	allocate(t, []*Group{g}, 100)
}

func TestShare(t *testing.T) {
	gs := join(t, 2)
	as := make([]*Allocation, 2)
	ms := make([]*Memory, 2)
	for r, err := range each(2, func(r int) (err error) {
		if as[r], err = Allocate(gs[r].cfg.Device, 5000); err != nil {
			return err
		}
		poke(t, gs[r].cfg.Device, as[r].Ptr+8, uint32(70+r))
		ms[r], err = gs[r].Share(within(t, 2*time.Minute), as[r].Handle, as[r].Size)
		return err
	}) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	for r, g := range gs {
		for peer := range gs {
			if v := peek(t, g.cfg.Device, ms[r].At(peer)+8); v != uint32(70+peer) {
				t.Errorf("rank %d sees %d at %d", r, v, peer)
			}
		}
	}
	poke(t, gs[0].cfg.Device, ms[0].At(1), 9)
	if v := peek(t, gs[1].cfg.Device, as[1].Ptr); v != 9 {
		t.Errorf("at the allocation's own address: %d", v)
	}
	for r := range gs {
		if err := errors.Join(ms[r].Close(), as[r].Close(), as[r].Close()); err != nil {
			t.Error(err)
		}
	}
	for r, err := range each(2, func(r int) error { _, err := gs[r].Share(within(t, 2*time.Minute), cuda.Handle{}, 5); return err }) {
		if err == nil || !strings.Contains(err.Error(), "multiple") {
			t.Errorf("rank %d shared 5 bytes: %v", r, err)
		}
	}
}

// When one rank cannot, all say whose fault it is, nothing is left behind, and
// the group goes on.
func TestAgreedFailure(t *testing.T) {
	for _, c := range []struct {
		name string
		call string // fails once, somewhere
		size func(rank int) uint64
		want string
	}{
		{"sizes differ", "", func(r int) uint64 { return uint64(1+r/2) << 21 }, "GPU rank 2: asks for 4194304 bytes, rank 0 for 2097152"},
		{"nonsense", "", func(r int) uint64 { return uint64(min(r, 1)) }, "GPU rank 0: 0 bytes"},
		{"no memory", "cuMemCreate", nil, "out of memory"},
		{"no handle", "cuMemExportToShareableHandle", nil, "out of memory"},
		{"no addresses", "cuMemAddressReserve", nil, "out of memory"},
		{"no import", "cuMemImportFromShareableHandle", nil, "memory of rank"},
		{"no mapping", "cuMemMap", nil, "memory of rank"},
		{"no access", "cuMemSetAccess", nil, "memory of rank"},
		{"no stream", "cuStreamCreateWithPriority", nil, "out of memory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			gs := join(t, 3)
			before := openFiles(t)
			size := func(int) uint64 { return 1 }
			if c.size != nil {
				size = c.size
			}
			if c.call != "" {
				cudatest.Fail(c.call, 2, 1)
			}
			for r, err := range each(3, func(r int) error { _, err := gs[r].Alloc(within(t, 2*time.Minute), size(r)); return err }) {
				var re *RankError
				if err == nil || !strings.Contains(err.Error(), c.want) || !errors.As(err, &re) || errors.Is(err, ErrBroken) {
					t.Errorf("rank %d: %v", r, err)
				}
			}
			if n := openFiles(t); n != before {
				t.Errorf("%d open files, %d before", n, before)
			}
			cudatest.Heal()
			allocate(t, gs, 1)
		})
	}
}

// Peers that die, stall or talk nonsense are named by those who suffer.
func TestBadPeer(t *testing.T) {
	pair := func(t *testing.T, fds ...int) (oob []byte) { return unix.UnixRights(fds...) }
	memfd := func(t *testing.T) int {
		fd, err := unix.MemfdCreate("fakegpu1", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	offer := message{kind: kindOffer, seq: 1, bytes: 2 << 20}
	for _, c := range []struct {
		name   string
		act    func(t *testing.T, g *Group)
		want   string
		agreed bool
	}{
		{"hangs up", func(_ *testing.T, g *Group) { g.Close() }, "GPU rank 1: hung up", false},
		{"stalls", func(*testing.T, *Group) {}, "GPU rank 1: no answer", false},
		{"stalls later", func(t *testing.T, g *Group) { send(g.conns[0], offer, memfd(t)); send(g.conns[2], offer, memfd(t)) }, "GPU rank 1: no answer", false},
		{"sends no memory", func(t *testing.T, g *Group) {
			each(3, func(r int) error { // it keeps to the protocol otherwise
				if r == 1 {
					return nil
				}
				send(g.conns[r], offer, -1)
				receive(g.conns[r])
				send(g.conns[r], message{kind: kindMapped, seq: 1}, -1)
				_, err := receive(g.conns[r])
				return err
			})
		}, "rank 1 sent no memory", true},
		{"sends less than it says", func(t *testing.T, g *Group) {
			each(3, func(r int) error {
				if r == 1 {
					return nil
				}
				send(g.conns[r], offer, memfd(t))
				m, _ := receive(g.conns[r])
				closeAll([]message{m})
				send(g.conns[r], message{kind: kindMapped, seq: 1}, -1)
				_, err := receive(g.conns[r])
				return err
			})
		}, "memory of rank 1", true},
		{"sends many files", func(t *testing.T, g *Group) {
			for _, r := range []int{0, 2} {
				g.conns[r].WriteMsgUnix(offer.encode(), pair(t, 0, 1, 2), nil)
			}
		}, "GPU rank 1: sent several", false},
		{"sends far too many", func(t *testing.T, g *Group) {
			for _, r := range []int{0, 2} {
				g.conns[r].WriteMsgUnix(offer.encode(), pair(t, make([]int, 50)...), nil)
			}
		}, "GPU rank 1: sent several", false},
		{"talks nonsense", func(t *testing.T, g *Group) {
			for _, r := range []int{0, 2} {
				g.conns[r].WriteMsgUnix([]byte("hello"), pair(t, 1), nil)
			}
		}, "GPU rank 1: a message of 5 bytes", false},
		{"is elsewhere", func(t *testing.T, g *Group) {
			for _, r := range []int{0, 2} {
				send(g.conns[r], message{kind: kindMapped, seq: 7}, 1)
			}
		}, "at step 2 of call 7", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			gs := join(t, 3)
			before := openFiles(t)
			ctx := within(t, 2*time.Minute)
			if strings.Contains(c.want, "no answer") {
				ctx = within(t, time.Second)
			}
			errs := each(3, func(r int) error {
				if r == 1 {
					c.act(t, gs[1])
					return nil
				}
				_, err := gs[r].Alloc(ctx, 1)
				return err
			})
			named := false
			for _, r := range []int{0, 2} {
				// One may hear of it from the other.
				if errs[r] == nil || !strings.Contains(errs[r].Error(), c.want) && !strings.Contains(errs[r].Error(), "gave up") {
					t.Errorf("rank %d: %v", r, errs[r])
				}
				named = named || strings.Contains(errs[r].Error(), c.want)
				if errors.Is(errs[r], ErrBroken) == c.agreed {
					t.Errorf("rank %d: broken is %v: %v", r, !c.agreed, errs[r])
				}
				if _, err := gs[r].Alloc(within(t, 10*time.Millisecond), 1); err == nil {
					t.Error("a broken group allocates")
				}
			}
			if !named {
				t.Errorf("nobody said %q", c.want)
			}
			if n := openFiles(t); c.name != "hangs up" && n-before > 4 { // offers that nobody has read yet may hold some
				t.Errorf("%d open files, %d before", n, before)
			}
		})
	}
}

func TestJoinFails(t *testing.T) {
	t.Run("wrong key", func(t *testing.T) {
		cs := configs(t, 2)
		cs[1].Key = []byte("another secret that is long enough")
		errs := each(2, func(r int) error { _, err := Join(within(t, 3*time.Second), cs[r]); return err })
		if errs[0] == nil || !strings.Contains(errs[0].Error(), "ranks [1] did not connect") {
			t.Errorf("rank 0: %v", errs[0])
		}
		if errs[1] == nil || !strings.Contains(errs[1].Error(), "GPU rank 0: handshake: it does not know the key") {
			t.Errorf("rank 1: %v", errs[1])
		}
	})
	t.Run("open folder", func(t *testing.T) {
		cs := configs(t, 2)
		cs[1].Dir = filepath.Join(t.TempDir(), "open")
		os.Mkdir(cs[1].Dir, 0o755)
		for r, err := range each(2, func(r int) error { _, err := Join(within(t, 2*time.Minute), cs[r]); return err }) {
			if err == nil || !strings.Contains(err.Error(), "chmod 700") {
				t.Errorf("rank %d: %v", r, err)
			}
		}
	})
	t.Run("long path", func(t *testing.T) {
		cs := configs(t, 2)
		cs[0].Dir = filepath.Join(cs[0].Dir, strings.Repeat("x", 100))
		for r, err := range each(2, func(r int) error { _, err := Join(within(t, 2*time.Minute), cs[r]); return err }) {
			if err == nil || !strings.Contains(err.Error(), "shorter folder") {
				t.Errorf("rank %d: %v", r, err)
			}
		}
	})
	t.Run("strangers", func(t *testing.T) {
		cs := configs(t, 2)
		inner := cs[1].Exchange
		cs[1].Exchange = func(ctx context.Context, b []byte) ([][]byte, error) {
			blobs, err := inner(ctx, b)
			socket := strings.Split(string(blobs[0]), `"`)[3]
			for i := range 9 { // more than are handshaken at a time, some silent
				c, err := net.Dial("unixpacket", socket)
				if err != nil {
					t.Error(err)
					continue
				}
				t.Cleanup(func() { c.Close() })
				if i%3 > 0 {
					c.Write([]byte(strings.Repeat("x", i*9)))
					c.Close()
				}
			}
			return blobs, err
		}
		gs := make([]*Group, 2)
		for r, err := range each(2, func(r int) (err error) { gs[r], err = Join(within(t, 2*time.Minute), cs[r]); return }) {
			if err != nil {
				t.Fatalf("rank %d: %v", r, err)
			}
		}
		allocate(t, gs, 1)
		for _, g := range gs {
			g.Close()
		}
		if left, _ := os.ReadDir(cs[0].Dir); len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	t.Run("nonsense", func(t *testing.T) {
		d := cudatest.Device(t, 0)
		for _, c := range []Config{{}, {Device: d, Rank: 2, Size: 2}, {Device: d, Size: 2, Key: []byte("short"), Exchange: gather(2)(0)}} {
			if _, err := Join(t.Context(), c); err == nil {
				t.Errorf("%+v joined", c)
			}
		}
	})
}

// child is rank 1 of two; it exchanges lines of hex over its standard streams.
func child() error {
	drv, err := cuda.Open()
	if err != nil {
		return err
	}
	d, err := drv.Device(1)
	if err != nil {
		return err
	}
	defer d.Close()
	in := bufio.NewReader(os.Stdin)
	g, err := Join(context.Background(), Config{Device: d, Rank: 1, Size: 2, Key: key, Dir: os.Getenv("SYMM_TEST_CHILD"),
		Exchange: func(_ context.Context, b []byte) ([][]byte, error) {
			fmt.Println(hex.EncodeToString(b))
			line, err := in.ReadString('\n')
			if err != nil {
				return nil, err
			}
			theirs, err := hex.DecodeString(strings.TrimSpace(line))
			return [][]byte{theirs, b}, err
		}})
	if err != nil {
		return err
	}
	defer g.Close()
	m, err := g.Alloc(context.Background(), 1)
	if err != nil {
		return err
	}
	// Answer through memory alone: wait for a word in ours, write one into theirs.
	s := d.StreamOf(0)
	if err := errors.Join(s.Wait32(m.Own(), 1), s.Write32(m.At(0), 2), s.Synchronize()); err != nil {
		return err
	}
	// Then die in the middle of an agreement, which the parent must notice.
	in.ReadString('\n')
	os.Exit(0)
	return nil
}

func TestTwoProcesses(t *testing.T) {
	d := cudatest.Device(t, 0)
	dir := filepath.Join(t.TempDir(), "run")
	ctx := within(t, 2*time.Minute)
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), "SYMM_TEST_CHILD="+dir)
	cmd.Stderr = os.Stderr
	stdin, _ := cmd.StdinPipe()
	stdout, _ := cmd.StdoutPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer stdin.Close()
	g, err := Join(ctx, Config{Device: d, Rank: 0, Size: 2, Key: key, Dir: dir, Exchange: func(_ context.Context, b []byte) ([][]byte, error) {
		fmt.Fprintln(stdin, hex.EncodeToString(b))
		line, err := bufio.NewReader(stdout).ReadString('\n')
		if err != nil {
			return nil, err
		}
		theirs, err := hex.DecodeString(strings.TrimSpace(line))
		return [][]byte{b, theirs}, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	m, err := g.Alloc(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	s := d.StreamOf(0)
	if err := errors.Join(s.Write32(m.At(1), 1), s.Wait32(m.Own(), 2), s.Wait(ctx)); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(10*time.Millisecond, func() { stdin.Close() })
	if _, err := g.Alloc(ctx, 1); !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "GPU rank 1: hung up") {
		t.Errorf("after the child's death: %v", err)
	}
	poke(t, d, m.At(1), 3) // its memory outlives it while we map it
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(message{kind: kindOffer, seq: 3, bytes: 1 << 21, failed: true, text: "why"}.encode(), unix.UnixRights(1, 2))
	f.Fuzz(func(t *testing.T, b, oob []byte) {
		if m, err := decode(b); err == nil {
			if m2, err := decode(m.encode()); err != nil || m2 != m {
				t.Fatalf("%+v became %+v, %v", m, m2, err)
			}
		}
		descriptors(oob)
	})
}

// TestNoRoomForDescriptor: a process that may open no more files is told that it is so.
func TestNoRoomForDescriptor(t *testing.T) {
	ln, err := listen(filepath.Join(t.TempDir(), "own"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	out, err := net.DialUnix("unixpacket", nil, ln.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := ln.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := send(out, message{kind: kindOffer}, int(os.Stdin.Fd())); err != nil {
		t.Fatal(err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 1
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	m, err := receive(in)
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); e != nil {
		t.Fatal(e)
	}
	if err == nil || m.fd >= 0 || !strings.Contains(err.Error(), "ulimit -n") {
		t.Errorf("descriptor %d, %v", m.fd, err)
	}
}
