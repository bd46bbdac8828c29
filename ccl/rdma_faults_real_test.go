package ccl_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// pathFault is one thing that breaks while two ranks, each with two NICs,
// communicate without pause.
type pathFault struct {
	Name     string
	Coll     record.CollKind
	do       string        // what breaks it
	again    string        // 50 ms later, when the connection is still busy with the first
	repair   string        // what repairs it; "" where nothing can
	lanes    int           // queue pairs of the connection, 1 by default
	late     time.Duration // how long rank 1 computes before one of its operations
	unharmed bool          // the lane may not leave its path for this
	fatal    bool          // no path is left
}

// pathOutcome is a row of the table.
type pathOutcome struct {
	Fault      string   `json:"fault"`
	Collective string   `json:"collective"`
	ZeroMs     float64  `json:"zero_throughput_ms"` // the longest time in which a rank received nothing
	Switches   uint64   `json:"switches"`
	Resent     uint64   `json:"resent_bytes"`
	Exact      bool     `json:"bit_exact"`
	Operations int      `json:"operations"`
	BackMs     float64  `json:"switched_back_after_ms"` // from the repair; -1: there was none
	ReadyMs    float64  `json:"all_paths_up_after_ms"`  // from the repair
	Down       []string `json:"links_down"`             // before the repair, by both ranks' records
	Verdict    string   `json:"verdict"`                // all that the master has ever said of the row's job
	Errors     []string `json:"errors,omitempty"`
}

// TestRealRDMAFaults breaks paths under two ranks: results stay what they are bit for
// bit, and the ranks go on over the other path. Where none is left both ranks fail,
// and say with what. Agents and a master watch: no link is blamed while another
// carries on, and two ranks without a path are, with all their ports. The table goes to the log and to $OUT, as text and as JSON.
func TestRealRDMAFaults(t *testing.T) {
	faults := []pathFault{
		{Name: "none", Coll: record.AllReduce, unharmed: true},
		{Name: "B computes for 2 s", Coll: record.AllReduce, late: 2 * time.Second, unharmed: true},
		{Name: "1 % of packets lost both ways", Coll: record.AllReduce, do: "tc qdisc add dev a0 root netem loss 1%; tc qdisc add dev b0 root netem loss 1%", repair: "rails up 0", unharmed: true},
		{Name: "backup goes down", Coll: record.AllReduce, do: "ip link set a1 down", repair: "rails up 1", unharmed: true},
		{Name: "A's port goes down", Coll: record.AllReduce, do: "ip link set a0 down", repair: "rails up 0"},
		{Name: "A's port goes down", Coll: record.ReduceScatter, do: "ip link set a0 down", repair: "rails up 0"},
		{Name: "B's port goes down", Coll: record.AllReduce, do: "ip link set b0 down", repair: "rails up 0"},
		{Name: "B's port goes down", Coll: record.ReduceScatter, do: "ip link set b0 down", repair: "rails up 0"},
		{Name: "A's port goes down, 4 queue pairs", Coll: record.AllReduce, lanes: 4, do: "ip link set a0 down", repair: "rails up 0"},
		{Name: "all from A to B is lost", Coll: record.AllReduce, do: "tc qdisc add dev a0 root netem loss 100%", repair: "rails up 0"},
		{Name: "all from A to B is lost", Coll: record.ReduceScatter, do: "tc qdisc add dev a0 root netem loss 100%", repair: "rails up 0"},
		{Name: "all from B to A is lost", Coll: record.AllReduce, do: "tc qdisc add dev b0 root netem loss 100%", repair: "rails up 0"},
		{Name: "A's port flaps", Coll: record.AllReduce, do: "ip link set a0 down", again: "rails up 0; ip link set a0 down", repair: "rails up 0"},
		{Name: "A's NIC is removed, then its link", Coll: record.AllReduce, do: "rdma link delete rxa0 >/dev/null 2>&1 & ip link set a0 down"},
		// Down first: rdma_rxe of Linux 6.1 may post for ever to an interface that is removed.
		{Name: "A's interface goes down and is removed", Coll: record.ReduceScatter, do: "ip link set a0 down; ip link delete a0 >/dev/null 2>&1 &"},
		{Name: "both ports of A go down", Coll: record.AllReduce, do: "ip link set a0 down", again: "ip link set a1 down", fatal: true},
		{Name: "A's first and B's second port go down", Coll: record.ReduceScatter, do: "ip link set a0 down", again: "ip link set b1 down", fatal: true},
		{Name: "port down, then the other path loses all", Coll: record.AllReduce, do: "ip link set a0 down", again: "tc qdisc add dev b1 root netem loss 100%", fatal: true},
	}
	var table []pathOutcome
	for _, f := range faults {
		t.Run(f.Name+", "+f.Coll.String(), func(t *testing.T) {
			o := f.run(t)
			table = append(table, o)
		})
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "fault\tcollective\tzero throughput\tswitches\tresent\tbit-exact\tback after\tboth ready\tlinks down\tverdict\terrors")
	for _, o := range table {
		ms := func(v float64) string {
			if v < 0 {
				return "-"
			}
			return fmt.Sprintf("%.0f ms", v)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%v of %d\t%s\t%s\t%s\t%s\t%s\n", o.Fault, o.Collective, ms(o.ZeroMs), o.Switches, o.Resent, o.Exact, o.Operations, ms(o.BackMs), ms(o.ReadyMs), strings.Join(o.Down, " "), o.Verdict, strings.Join(o.Errors, "; "))
	}
	w.Flush()
	t.Log("\n" + b.String())
	if dir := os.Getenv("OUT"); dir != "" {
		j, err := json.MarshalIndent(table, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string]string{"rdma_faults.json": string(j) + "\n", "rdma_faults.table": b.String()} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
				t.Error(err)
			}
		}
	}
}

// witness looks at what the two ranks' flight recorders tell, as an agent does.
type witness struct {
	readers []*record.Reader
	mu      sync.Mutex
	gap     time.Duration // the longest that a rank has received nothing, since reset
	down    map[string]bool
	conns   []record.ConnStatus // of all ranks, as last seen
	stop    chan struct{}
	done    chan struct{}
}

func watchPaths(t *testing.T, recs []*record.Writer) *witness {
	t.Helper()
	w := &witness{down: map[string]bool{}, stop: make(chan struct{}), done: make(chan struct{})}
	for _, rec := range recs {
		r, err := record.Open(rec.Path())
		if err != nil {
			t.Fatal(err)
		}
		w.readers = append(w.readers, r)
	}
	go func() {
		defer close(w.done)
		received, since := make([]uint64, len(recs)), make([]time.Time, len(recs))
		for {
			select {
			case <-w.stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
			now := time.Now()
			var conns []record.ConnStatus
			var gap time.Duration
			for i, r := range w.readers {
				var sum uint64
				for _, c := range r.Conns(nil) {
					conns = append(conns, c)
					sum += c.Received
				}
				if sum != received[i] || since[i].IsZero() {
					received[i], since[i] = sum, now
				}
				gap = max(gap, now.Sub(since[i]))
			}
			w.mu.Lock()
			w.conns, w.gap = conns, max(w.gap, gap)
			for _, c := range conns {
				if c.Link == record.LinkDown {
					w.down[c.Name] = true
				}
			}
			w.mu.Unlock()
		}
	}()
	return w
}

func (w *witness) close() {
	close(w.stop)
	<-w.done
	for _, r := range w.readers {
		r.Close()
	}
}

// reset forgets the longest pause.
func (w *witness) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gap = 0
}

// longest is the longest pause since reset, in ms.
func (w *witness) longest() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return float64(w.gap.Milliseconds())
}

// totals of all paths.
func (w *witness) totals() (switches, resent uint64, down []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		switches += c.Switches
		resent += c.Resent
	}
	for name := range w.down {
		down = append(down, name)
	}
	slices.Sort(down)
	return switches, resent, down
}

// paths reports whether every lane's traffic is on its first path, and whether all
// paths are up.
func (w *witness) paths() (first, up bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	first, up = len(w.conns) > 0, true
	for _, c := range w.conns {
		if c.Transport != record.TransportRDMA {
			continue
		}
		up = up && c.Link != record.LinkDown
		if primary := c.Channel%2 == 0; primary && c.Link == record.LinkDown || !primary && c.Link == record.LinkSwitched {
			first = false
		}
	}
	return first, first && up
}

const faultElements = 128 << 10 // float32, of each rank's share

func (f pathFault) run(t *testing.T) pathOutcome {
	o := pathOutcome{Fault: f.Name, Collective: f.Coll.String(), BackMs: -1, ReadyMs: -1}
	prepare := onRails(t, 2, 2)
	t.Cleanup(func() {
		sh(t, "if [ -e /sys/class/infiniband/rxa0 ] && [ -e /sys/class/net/a0 ]; then rails up 0; else rails new 0; fi; rails up 1")
	})
	dirs := []string{t.TempDir(), t.TempDir()} // of each host's agent
	recs := make([]*record.Writer, 2)
	for r := range recs {
		var err error
		if recs[r], err = record.Create(record.Options{Dir: dirs[r], Identity: record.Identity{Job: "faults", Rank: int32(r), WorldSize: 2}}); err != nil {
			t.Fatal(err)
		}
	}
	w := watchPaths(t, recs)
	p := startPipeline(t, "faults", dirs)
	var finished [2]atomic.Int64
	var stop, wrong atomic.Bool
	failed := make([]error, 2)
	ended := make(chan struct{}) // both ranks have left the communicator
	go func() {
		defer close(ended)
		ranks(t, 2, func(cfg *ccl.Config) {
			prepare(cfg)
			cfg.Recorder = recs[cfg.Rank]
			cfg.RDMA.QueuePairs = f.lanes
			cfg.RDMA.FailbackAfter = time.Second
			cfg.RDMA.GiveUpAfter = 2 * time.Second
		}, func(ctx context.Context, c *ccl.Comm) error {
			err := f.ops(ctx, c, &stop, &finished[c.Rank()])
			if errors.Is(err, errWrongBits) {
				wrong.Store(true)
			}
			if err == nil || wrong.Load() {
				return err
			}
			failed[c.Rank()] = err
			return errExpected
		})
	}()
	// progress waits until both ranks have done n more operations.
	progress := func(n int64) bool {
		a, b := finished[0].Load(), finished[1].Load()
		deadline := time.After(20 * time.Second)
		for finished[0].Load() < a+n || finished[1].Load() < b+n {
			select {
			case <-ended:
				return false
			case <-deadline:
				t.Errorf("not %d operations in 20 s", n)
				return false
			case <-time.After(5 * time.Millisecond):
			}
		}
		return true
	}
	ok := progress(3)
	w.reset()
	if f.do != "" {
		sh(t, f.do)
	}
	if f.again != "" {
		time.Sleep(50 * time.Millisecond)
		sh(t, f.again)
	}
	if f.fatal {
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Error("no error 20 s after the last path was gone")
		}
		o.ZeroMs = w.longest() // until both have failed
	} else if ok = ok && progress(8); !ok {
		t.Error("the ranks did not go on")
	}
	o.Switches, o.Resent, o.Down = w.totals()
	switch {
	case f.fatal:
		p.await(t, "a verdict on the connection without a path", p.linkDown)
	case !f.unharmed && ok:
		p.await(t, "both agents see a path down", p.pathsDown)
	}
	if f.repair != "" && ok {
		sh(t, f.repair)
		began := time.Now()
		for first, up := w.paths(); !up; first, up = w.paths() {
			now := time.Since(began)
			if first && o.BackMs < 0 && !f.unharmed {
				o.BackMs = float64(now.Milliseconds())
			}
			if now > 20*time.Second {
				t.Error("not all is as before 20 s after the repair")
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		o.ReadyMs = float64(time.Since(began).Milliseconds())
		if o.BackMs < 0 && !f.unharmed { // with the last path at the latest
			o.BackMs = o.ReadyMs
		}
		progress(3)
	}
	if !f.fatal {
		o.ZeroMs = w.longest()
	}
	stop.Store(true)
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the ranks do not end")
	}
	w.close()
	o.Verdict = p.verdicts()
	f.judge(t, p.incidents())
	o.Exact, o.Operations = !wrong.Load(), int(finished[0].Load())
	for r, err := range failed {
		if err == nil {
			continue
		}
		o.Errors = append(o.Errors, fmt.Sprintf("rank %d: %v", r, err))
		if !f.fatal || !errors.Is(err, ccl.ErrPeerLost) {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if f.fatal && len(o.Errors) != 2 {
		t.Errorf("errors of both ranks are %q", o.Errors)
	}
	if switched := o.Switches > 0; !f.fatal && switched == f.unharmed {
		t.Errorf("%d switches", o.Switches)
	}
	return o
}

// judge fails the row when an innocent link is named, or the guilty one is not, with
// both its ranks and all their ports.
func (f pathFault) judge(t *testing.T, incidents []collector.Incident) {
	dead := false
	for _, i := range incidents {
		v := i.Verdict
		switch {
		case v.Class != diagnosis.CommunicationHang && v.Class != diagnosis.CommunicationSlow:
		case !f.fatal:
			// While the retries last that find a loss, the connection stands still and may
			// be suspected.
			if f.unharmed || !i.Confirmed.IsZero() {
				t.Errorf("a link is named that does no harm: %s", sentence(i))
			}
		case v.Culprits[0].Reason == "link_down" && !i.Confirmed.IsZero():
			dead = v.Class == diagnosis.CommunicationHang && v.Culprits[0].Kind == diagnosis.CulpritConnection && v.Culprits[0].Rank+v.Culprits[0].Peer == 1
			why := strings.Join(v.Why, "\n")
			for _, port := range []string{"rxa0/1", "rxa1/1", "rxb0/1", "rxb1/1"} {
				if !strings.Contains(why, port) {
					t.Errorf("the evidence does not name port %s: %s", port, why)
				}
			}
		}
	}
	if f.fatal && !dead {
		t.Error("the dead connection is not named")
	}
}

var errWrongBits = errors.New("wrong bits")

// ops calls the collective until stop, which rank 0 passes on in the first
// element, and checks each result: of two ranks the sum is one addition.
func (f pathFault) ops(ctx context.Context, c *ccl.Comm, stop *atomic.Bool, finished *atomic.Int64) error {
	const n = faultElements
	s := c.NewStream()
	pools := make([][]float32, 2) // of both ranks
	for r := range pools {
		rng := rand.New(rand.NewPCG(uint64(r), 5))
		pools[r] = make([]float32, 2*n+1024)
		for i := range pools[r] {
			pools[r][i] = rng.Float32()*2000 - 1000
		}
	}
	in, out := make([]float32, 2*n), make([]float32, 2*n)
	for round := 0; ; round++ {
		send, recv, from := in[:n], out[:n], 0
		if f.Coll == record.ReduceScatter {
			send, recv, from = in, out[:n], c.Rank()*n
		}
		at := round % 1024
		copy(send, pools[c.Rank()][at:])
		for i := 0; i < len(send); i += n { // both shares tell
			send[i] = 0
			if c.Rank() == 0 && stop.Load() {
				send[i] = 1
			}
		}
		if round == 5 && c.Rank() == 1 {
			time.Sleep(f.late)
		}
		var err error
		if f.Coll == record.ReduceScatter {
			err = c.ReduceScatter(s, ccl.Of(send), ccl.Of(recv), ccl.Sum)
		} else {
			err = c.AllReduce(s, ccl.Of(send), ccl.Of(recv), ccl.Sum)
		}
		if err = do(ctx, s, err); err != nil {
			return err
		}
		for i := 1; i < n; i++ {
			if want := pools[0][at+from+i] + pools[1][at+from+i]; math.Float32bits(recv[i]) != math.Float32bits(want) {
				return fmt.Errorf("%w: operation %d, element %d of rank %d is %v, want %v", errWrongBits, round, i, c.Rank(), recv[i], want)
			}
		}
		finished.Add(1)
		if recv[0] != 0 {
			return nil
		}
	}
}

func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", command, err, out)
	}
}
