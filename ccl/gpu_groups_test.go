package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// The tests of this file run groups with several messages of a pair, whose messages
// need each other through other ranks.

// program is messages, and the groups in which each rank calls them.
type program struct {
	name   string
	list   []message
	groups [][][]part // of each rank
	area   int
}

// part is one side of a message.
type part struct {
	message int
	send    bool
}

func newProgram(name string, ranks int) *program {
	return &program{name: name, groups: make([][][]part, ranks)}
}

// message adds a message without calls.
func (p *program) message(from, to, size int) int {
	p.list = append(p.list, message{from, to, size, p.area + len(p.list)%3})
	p.area += (size + 31) &^ 15
	return len(p.list) - 1
}

// messages adds messages of sizes that begin with the first one in turn.
func (p *program) messages(from, to, count, first int, sizes []int) (added []int) {
	for i := range count {
		added = append(added, p.message(from, to, sizes[(first+i)%len(sizes)]))
	}
	return added
}

func sends(messages []int) (list []part) {
	for _, l := range messages {
		list = append(list, part{l, true})
	}
	return list
}

func receives(messages []int) (list []part) {
	for _, l := range messages {
		list = append(list, part{l, false})
	}
	return list
}

// group adds a rank's call of a group.
func (p *program) group(rank int, parts ...[]part) {
	var all []part
	for _, list := range parts {
		all = append(all, list...)
	}
	p.groups[rank] = append(p.groups[rank], all)
}

// call makes this rank's calls.
func (p *program) call(c *ccl.Comm, m *memory, streams ...*ccl.Stream) error {
	for i, parts := range p.groups[c.Rank()] {
		err := c.Group(streams[i%len(streams)], func(g *ccl.Group) error {
			for _, k := range parts {
				if err := p.list[k.message].call(g, m, p.area, k.send); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// runPrograms runs programs of n ranks, each three times; captured: as a graph and its
// replays.
func runPrograms(t tb, list []*program, n, gpus int, window, captured bool, streams int, prepare func(*ccl.Config)) {
	t.Helper()
	size := 0
	for _, p := range list {
		size = max(size, 2*p.area+32)
	}
	held := make([]any, 3*n) // what fails is still in use when the body returns
	ranks(t, n, prepare, func(ctx context.Context, c *ccl.Comm) error {
		m, err := newMemory(ctx, c, size, window)
		if err != nil {
			return err
		}
		var on []*ccl.Stream
		for range streams {
			on = append(on, c.NewStream())
		}
		for _, p := range list {
			call := func() error { return p.call(c, m, on...) }
			var g *ccl.Graph
			if captured {
				if g, err = capture(ctx, c, on[0], gpus, func() error { return p.call(c, m, on[0]) }); err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
				call = func() error { return g.Launch(on[0]) }
			}
			held[3*c.Rank()], held[3*c.Rank()+1], held[3*c.Rank()+2] = m, on, g
			for salt := range 3 {
				if err := p.once(ctx, m, call, on, salt); err != nil {
					return fmt.Errorf("%s, run %d: %w", p.name, salt, err)
				}
			}
			if g != nil {
				if err := g.Close(); err != nil {
					return err
				}
			}
		}
		return m.free(ctx)
	})
	runtime.KeepAlive(held)
}

// once runs the program and checks what has come.
func (p *program) once(ctx context.Context, m *memory, call func() error, on []*ccl.Stream, salt int) error {
	if err := m.write(p.list, p.area, salt); err != nil {
		return err
	}
	if err := call(); err != nil {
		return err
	}
	for _, s := range on {
		if err := s.Wait(ctx); err != nil {
			return err
		}
	}
	return m.read(p.list, p.area, salt)
}

// circle: rank 0 sends each messages to rank 1 and receives in the same group what comes
// of it, round all ranks.
func circle(n, each int, sizes []int) *program {
	p := newProgram(fmt.Sprintf("circle, %d of %v bytes", each, sizes), n)
	var links [][]int
	for r := range n {
		links = append(links, p.messages(r, (r+1)%n, each, r, sizes))
	}
	p.group(0, receives(links[n-1]), sends(links[0]))
	for r := 1; r < n; r++ {
		p.group(r, receives(links[r-1]))
		p.group(r, sends(links[r]))
	}
	return p
}

// stages: the first rank sends each messages forward and receives as many backward in
// one group; stages between pass on what they have, the last one turns it round.
func stages(n, each int, sizes []int) *program {
	p := newProgram(fmt.Sprintf("stages, %d of %v bytes", each, sizes), n)
	var forward, backward [][]int
	for r := range n - 1 {
		forward = append(forward, p.messages(r, r+1, each, r, sizes))
		backward = append(backward, p.messages(r+1, r, each, r+1, sizes))
	}
	p.group(0, sends(forward[0]), receives(backward[0]))
	for r := 1; r < n-1; r++ {
		p.group(r, receives(forward[r-1]))
		p.group(r, receives(backward[r]), sends(forward[r]))
		p.group(r, sends(backward[r-1]))
	}
	p.group(n-1, receives(forward[n-2]))
	p.group(n-1, sends(backward[n-2]))
	return p
}

// mixedSizes are sizes of every way.
var mixedSizes = []int{5, 300_001, 100_001, 700_003, 0}

// groupPrograms is programs of two and of five messages of a pair: by LL, direct, and of
// all sizes.
func groupPrograms(n int) [][]*program {
	both := func(f func(n, each int, sizes []int) *program, sizes ...int) []*program {
		return []*program{f(n, 2, sizes), f(n, 5, sizes)}
	}
	return [][]*program{
		both(circle, 100_001, 8, 0), both(circle, 300_001, 700_003), both(circle, mixedSizes...), both(stages, mixedSizes...),
		{stages(2, 2, []int{manyPieces, 100, 300_001})},
	}
}

// fewBlocks spares the fake GPUs threads; TestGPUMessages has as many as there are.
func fewBlocks(cfg *ccl.Config) {
	if faked {
		cfg.GPU.Blocks = 3
	}
}

// TestGPUGroups: groups that end only if their messages do not wait for each other.
func TestGPUGroups(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, window := range []bool{true, false} {
		for _, captured := range []bool{true, false} {
			if faked && window == captured || testing.Short() && captured {
				continue // half of them takes long enough
			}
			for _, list := range groupPrograms(n) {
				t.Run(fmt.Sprintf("%s, window %v, captured %v", list[0].name, window, captured), func(t *testing.T) {
					runPrograms(t, list, len(list[0].groups), gpus, window, captured, 1, onGPUs(t, gpus, fewPlaces, fewBlocks))
				})
			}
		}
	}
}

// TestGPUGroupsNodes is TestGPUGroups between nodes.
func TestGPUGroupsNodes(t *testing.T) {
	for i, nodes := range [][]int{{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 2}} {
		if testing.Short() && i < 2 {
			continue
		}
		t.Run(fmt.Sprint("nodes ", nodes), func(t *testing.T) {
			n, gpus := len(nodes), placed(t, nodes)
			list := []*program{circle(n, 2, mixedSizes), circle(n, 5, mixedSizes), stages(n, 2, mixedSizes), stages(n, 5, []int{5_000_001, 8, 300_001})}
			runPrograms(t, list, n, gpus, i%2 == 0, false, 1, onGPUs(t, gpus, fewPlaces, onNodes(nodes), fewBlocks))
		})
	}
}

// TestGPUGroupsRandom: whatever messages ranks send each other one after the other they
// may put in groups of several, each rank as it likes, and call those of different
// peers in any order.
func TestGPUGroupsRandom(t *testing.T) {
	most, gpus := gpuRanks(t)
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, most).Draw(rt, "ranks")
		rank := rapid.IntRange(0, n-1)
		way := rapid.SampledFrom([]string{"", "", "", "ll", "sym"}).Draw(rt, "way")
		sizes := []int{0, 5, 5, 700, 8 << 10, 8 << 10, 20_000, 100_001, 256<<10 + 16, 700_003}
		if way == "" {
			sizes = append(sizes, manyPieces)
		}
		p := newProgram("random", n)
		calls := make([][]part, n)
		for range rapid.IntRange(1, 12).Draw(rt, "bursts") {
			from, to := rank.Draw(rt, "from"), rank.Draw(rt, "to")
			for range rapid.IntRange(1, 5).Draw(rt, "messages") {
				l := p.message(from, to, rapid.SampledFrom(sizes).Draw(rt, "bytes"))
				if from == to { // in one group, whichever
					calls[from] = append(calls[from], part{l, true})
					continue
				}
				calls[from] = append(calls[from], part{l, true})
				calls[to] = append(calls[to], part{l, false})
			}
		}
		for r, list := range calls {
			for len(list) > 0 {
				k := rapid.IntRange(1, len(list)).Draw(rt, "group")
				p.group(r, p.shuffle(rt, r, list[:k]))
				list = list[k:]
			}
		}
		runPrograms(rt, []*program{p}, n, gpus, rapid.Bool().Draw(rt, "window"), rapid.Bool().Draw(rt, "captured"), rapid.IntRange(1, 2).Draw(rt, "streams"),
			func(cfg *ccl.Config) {
				cfg.Device, cfg.GPU.Algo = ccl.GPU(cfg.Rank%gpus), way
				fewBlocks(cfg)
			})
	})
}

// shuffle is a group's calls in any order that keeps those of each peer and direction.
func (p *program) shuffle(rt *rapid.T, rank int, list []part) (all []part) {
	type key struct {
		peer int
		send bool
	}
	queues, order := map[key][]part{}, []key{}
	add := func(k part, peer int) {
		queues[key{peer, k.send}] = append(queues[key{peer, k.send}], k)
		order = append(order, key{peer, k.send})
	}
	for _, k := range list {
		l := p.list[k.message]
		if l.from != l.to {
			add(k, l.from+l.to-rank)
			continue
		}
		add(k, rank)
		add(part{k.message, false}, rank)
	}
	for _, k := range rapid.Permutation(order).Draw(rt, "order") {
		all = append(all, queues[k][0])
		queues[k] = queues[k][1:]
	}
	return all
}

// TestGPUGroupsMany: more messages than a kernel's parameter holds, several times over.
func TestGPUGroupsMany(t *testing.T) {
	_, gpus := gpuRanks(t)
	for _, captured := range []bool{false, true} {
		t.Run(fmt.Sprintf("captured %v", captured), func(t *testing.T) {
			runPrograms(t, []*program{circle(2, 700, []int{9, 1, 0, 333, 16})}, 2, gpus, captured, captured, 1, onGPUs(t, gpus, fewPlaces, fewBlocks))
		})
	}
}

// TestGPUGroupsTooMany: between nodes there is a bound, and a group beyond it is refused.
func TestGPUGroupsTooMany(t *testing.T) {
	nodes := []int{0, 1}
	gpus := placed(t, nodes)
	ranks(t, 2, onGPUs(t, gpus, fewPlaces, onNodes(nodes), fewBlocks), func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		m, err := newMemory(ctx, c, 100, false)
		if err != nil {
			return err
		}
		err = c.Group(s, func(g *ccl.Group) error {
			for range 1025 {
				if err := g.Send(m.bytes(ccl.Uint8, 0, 1), 1-c.Rank()); err != nil {
					return err
				}
			}
			return nil
		})
		if !errors.Is(err, ccl.ErrInvalid) {
			return fmt.Errorf("a group of too many messages: %w", err)
		}
		return errors.Join(do(ctx, s, c.Barrier(s)), m.free(ctx)) // nothing was sent, and all goes on
	})
}

// TestGPUGroupsAbort: some of a group's messages have come, and then a rank aborts.
func TestGPUGroupsAbort(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, sizes := range [][]int{{100_001}, {300_001}, mixedSizes} {
		for _, window := range []bool{true, false} {
			p := stages(n, 5, sizes)
			held := make([]any, 2*n) // until Close has seen the kernels leave
			ranks(t, n, onGPUs(t, gpus, fewPlaces, fewBlocks), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, 2*p.area+32, window)
				if err != nil {
					return err
				}
				held[2*c.Rank()], held[2*c.Rank()+1] = s, m
				begun := time.Now()
				if c.Rank() == n-1 {
					first := part{p.groups[n-1][0][0].message, false}
					err := do(ctx, s, c.Group(s, func(g *ccl.Group) error { return p.list[first.message].call(g, m, p.area, false) }))
					if err != nil {
						return err
					}
					c.Abort(errors.New("on purpose"))
					return errExpected
				}
				err = do(ctx, s, p.call(c, m, s))
				if err := wantError(c, err, ccl.ErrAborted, begun); err != nil {
					return err
				}
				return errExpected
			})
			runtime.KeepAlive(held)
		}
	}
}

// groupsChild is a rank of TestGPUGroupsLost on its GPU.
func groupsChild(role string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, cfg, err := initFromEnv(ctx, nil)
	if err != nil {
		return err
	}
	defer cfg.Recorder.Close()
	s, p := c.NewStream(), stages(c.Size(), 5, mixedSizes)
	m, err := newMemory(ctx, c, 2*p.area+32, false)
	if err != nil {
		return err
	}
	if err := do(ctx, s, p.call(c, m, s)); err != nil {
		return err
	}
	fmt.Println("ready")
	if strings.HasSuffix(role, "victim") {
		select {} // until killed
	}
	io.ReadFull(os.Stdin, make([]byte, 1)) // the victim is dead
	begun := time.Now()
	for err == nil {
		err = do(ctx, s, p.call(c, m, s))
	}
	if e := wantError(c, err, ccl.ErrPeerLost, begun); e != nil {
		return e
	}
	if err := c.Close(); !errors.Is(err, ccl.ErrPeerLost) {
		return fmt.Errorf("Close returns %v", err)
	}
	runtime.KeepAlive(m)
	fmt.Println("lost")
	return nil
}

// TestGPUGroupsLost kills a rank that others have several messages for.
func TestGPUGroupsLost(t *testing.T) {
	n, gpus := gpuRanks(t)
	id, victim := freeID(t), n-1
	var ps []*rankProcess
	for r := range n {
		role := "gpu groups survivor"
		if r == victim {
			role = "gpu groups victim"
		}
		ps = append(ps, startRank(t, id, r, n, n, role, fmt.Sprintf("LOCKSTEP_DEVICE=cuda:%d", r%gpus)))
	}
	for r, p := range ps {
		p.expect(t, r, "ready")
	}
	ps[victim].cmd.Process.Kill()
	for _, p := range ps[:victim] {
		p.stdin.Write([]byte{1})
	}
	for r, p := range ps[:victim] {
		p.expect(t, r, "lost")
	}
}
