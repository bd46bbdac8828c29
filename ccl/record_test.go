package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// recorded runs ranks with a flight recorder each and returns what it holds.
func recorded(t *testing.T, n, per int, body func(ctx context.Context, c *ccl.Comm) error) (comms [][]record.CommStatus, records [][]record.Record) {
	t.Helper()
	return recordedIn(t, t.TempDir(), n, per, body)
}

func recordedIn(t *testing.T, dir string, n, per int, body func(ctx context.Context, c *ccl.Comm) error) (comms [][]record.CommStatus, records [][]record.Record) {
	t.Helper()
	recs := make([]*record.Writer, n)
	for r := range recs {
		var err error
		if recs[r], err = record.Create(record.Options{Dir: dir, Identity: record.Identity{Job: "test", Rank: int32(r), WorldSize: int32(n)}}); err != nil {
			t.Fatal(err)
		}
	}
	ranks(t, n, func(cfg *ccl.Config) { nodes(per)(cfg); cfg.Recorder = recs[cfg.Rank] }, body)
	for _, w := range recs {
		w.Close()
		r, err := record.Open(w.Path())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		buf := make([]record.Record, 10_000)
		records = append(records, buf[:r.Next(buf)])
		comms = append(comms, r.Comms(nil))
	}
	return comms, records
}

// untilToldOf returns when rank 0's recorder in dir tells that operation seq has begun and lasts.
func untilToldOf(ctx context.Context, dir string, seq uint64) error {
	files, err := filepath.Glob(filepath.Join(dir, "test.0.*"+record.Suffix))
	if err != nil || len(files) != 1 {
		return fmt.Errorf("recorders of rank 0: %v, %w", files, err)
	}
	r, err := record.Open(files[0])
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]record.Record, 1000)
	for ctx.Err() == nil {
		for _, rec := range buf[:r.Next(buf)] {
			if rec.Kind == record.KindStart && rec.Seq == seq {
				return nil
			}
		}
		time.Sleep(time.Millisecond)
	}
	return ctx.Err()
}

// TestRecorder: each operation leaves one record that says all of it, and who came
// last; one that lasts is told of before. The communicators' progress is what was called.
func TestRecorder(t *testing.T) {
	const ops = 20
	for _, per := range []int{2, 1} {
		t.Run(fmt.Sprintf("%d a node", per), func(t *testing.T) {
			dir := t.TempDir()
			comms, records := recordedIn(t, dir, 2, per, func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				for i := range ops {
					x := ccl.Of(make([]float32, 1<<i))
					if i == ops-1 { // rank 1 is late for the last
						if c.Rank() == 1 {
							if err := untilToldOf(ctx, dir, ops); err != nil {
								return err
							}
							time.Sleep(20 * time.Millisecond)
						}
					}
					if err := c.AllReduce(s, x, x, ccl.Avg); err != nil {
						return err
					}
					if err := s.Wait(ctx); err != nil {
						return err
					}
				}
				sub, err := c.Split(ctx, 0, c.Rank(), "sub")
				if err != nil {
					return err
				}
				return errors.Join(do(ctx, s, sub.Barrier(s)), sub.Close())
			})
			for r := range 2 {
				if len(comms[r]) != 2 {
					t.Fatalf("rank %d has %d communicators", r, len(comms[r]))
				}
				world, sub := comms[r][0], comms[r][1]
				if world.State != record.CommLeft || world.Name != "world" || world.Size != 2 || world.Rank != int32(r) ||
					world.Enqueued != ops || world.Started != ops || world.Finished != ops || world.Ops != ops || world.Coll != record.AllReduce {
					t.Errorf("rank %d: world %+v", r, world)
				}
				if sub.Parent != world.ID || sub.Name != "sub" || sub.Finished != 1 || sub.Coll != record.Barrier {
					t.Errorf("rank %d: sub %+v", r, sub)
				}
				got := map[record.Kind]map[uint64]record.Record{}
				for _, rec := range records[r] {
					if rec.Comm != world.Index || rec.Seq == 0 {
						continue
					}
					if got[rec.Kind] == nil {
						got[rec.Kind] = map[uint64]record.Record{}
					}
					if _, twice := got[rec.Kind][rec.Seq]; twice {
						t.Errorf("rank %d: two %v of operation %d", r, rec.Kind, rec.Seq)
					}
					got[rec.Kind][rec.Seq] = rec
				}
				last := int64(0)
				for seq := uint64(1); seq <= ops; seq++ {
					w := got[record.KindWhole][seq]
					if w.Coll != record.AllReduce || w.Op != record.Avg || w.DType != record.Float32 || w.Bytes != 4<<(seq-1) || w.Flags&record.FlagInPlace == 0 || w.Root != -1 ||
						w.Algo == record.AlgoNone || w.Proto == record.ProtoNone || w.Code != uint8(record.ResultOK) || w.Dur <= 0 || w.Wait > w.Dur || w.Mono-w.Dur < last {
						t.Errorf("rank %d: operation %d: %+v, the one before ended at %d", r, seq, w, last)
					}
					last = w.Mono
					if _, queued := got[record.KindEnqueue][seq]; queued && got[record.KindStart][seq].Stamp == 0 {
						t.Errorf("rank %d: operation %d did not queue", r, seq)
					}
				}
				if w := got[record.KindWhole][ops]; r == 0 {
					if w.Peer != 1 || w.Wait < int64(10*time.Millisecond) {
						t.Errorf("rank 0 waited for rank 1, but says %+v", w)
					}
					// It has lasted, so the ring told of it before it ended.
					q, b := got[record.KindEnqueue][ops], got[record.KindStart][ops]
					if q.Coll != w.Coll || q.Op != w.Op || q.DType != w.DType || q.Bytes != w.Bytes || q.Flags != w.Flags || q.Root != w.Root || q.Stream != w.Stream ||
						b.Algo != w.Algo || b.Proto != w.Proto || b.Stamp != w.Mono-w.Dur || b.Ticket > w.Ticket {
						t.Errorf("rank 0: enqueue %+v, start %+v of %+v", q, b, w)
					}
				}
			}
			if w := comms[0][0]; w.WaitNs == 0 || w.OwnNs == 0 || w.TransferNs == 0 {
				t.Errorf("rank 0's sums: %+v", w)
			}
		})
	}
}

// TestRecorderFailure: what was under way when a communicator failed is told,
// with the reason.
func TestRecorderFailure(t *testing.T) {
	dir := t.TempDir()
	comms, records := recordedIn(t, dir, 2, 2, func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), ccl.Of(make([]float32, 10))
		if c.Rank() == 1 {
			if err := untilToldOf(ctx, dir, 1); err != nil {
				return err
			}
			c.Abort(errors.New("enough"))
			return errExpected
		}
		if err := do(ctx, s, c.AllReduce(s, x, x, ccl.Sum)); !errors.Is(err, ccl.ErrAborted) {
			return fmt.Errorf("want an abort, got %v", err)
		}
		return errExpected
	})
	if c := comms[0][0]; c.State != record.CommAborted || c.Fault != record.ResultAborted || c.FaultPeer != 1 || c.Enqueued != 1 || c.Finished != 1 {
		t.Errorf("communicator %+v", c)
	}
	for _, r := range records[0] {
		if r.Kind == record.KindWhole && r.Code == uint8(record.ResultAborted) {
			return
		}
	}
	t.Errorf("nothing aborted in %+v", records[0])
}

// TestRecorderSaysWhyAborted: the recorder has a communicator's end, with its reason and
// whom that names, before any call returns it: a process that ends at once has said so.
func TestRecorderSaysWhyAborted(t *testing.T) {
	barrier := func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		return do(ctx, s, c.Barrier(s))
	}
	for _, tt := range []struct {
		name   string
		rank   func(ctx context.Context, c *ccl.Comm) error // of ranks 0 and 1
		two    func(ctx context.Context, c *ccl.Comm) error
		want   [3]record.Result
		naming [3]int32
	}{
		{"abort", barrier, func(ctx context.Context, c *ccl.Comm) error {
			c.Abort(errors.New("enough"))
			return c.Err()
		}, [3]record.Result{record.ResultAborted, record.ResultAborted, record.ResultAborted}, [3]int32{2, 2, -1}},
		{"peer has left", barrier, func(_ context.Context, c *ccl.Comm) error { return c.Close() },
			[3]record.Result{record.ResultPeerLost, record.ResultPeerLost}, [3]int32{2, 2}},
		{"mismatch", barrier, func(ctx context.Context, c *ccl.Comm) error {
			s, x := c.NewStream(), ccl.Of(make([]float32, 1<<20))
			return do(ctx, s, c.AllReduce(s, x, x, ccl.Sum))
		}, [3]record.Result{record.ResultMismatch, record.ResultMismatch, record.ResultMismatch}, [3]int32{-2, -2, -2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			recs := make([]*record.Writer, 3)
			for r := range recs {
				var err error
				if recs[r], err = record.Create(record.Options{Dir: dir, Identity: record.Identity{Job: "test", Rank: int32(r), WorldSize: 3}}); err != nil {
					t.Fatal(err)
				}
				defer recs[r].Close()
			}
			ranks(t, 3, func(cfg *ccl.Config) { cfg.Recorder = recs[cfg.Rank] }, func(ctx context.Context, c *ccl.Comm) error {
				body := tt.rank
				if c.Rank() == 2 {
					body = tt.two
				}
				err := body(ctx, c)
				if err == nil && tt.want[c.Rank()] == record.ResultOK {
					return nil
				}
				r, openErr := record.Open(recs[c.Rank()].Path())
				if openErr != nil {
					return openErr
				}
				defer r.Close()
				// -2: two ranks that disagree name each other, and who is first tells the third.
				naming := tt.naming[c.Rank()]
				s := r.Comms(nil)[0]
				if err == nil || s.State != record.CommAborted || s.Fault != tt.want[c.Rank()] || naming != -2 && s.FaultPeer != naming || s.StateAt == 0 {
					t.Errorf("rank %d: %v; recorded %v for %v naming %d, want %v naming %d", c.Rank(), err, s.State, s.Fault, s.FaultPeer, tt.want[c.Rank()], naming)
				}
				buf := make([]record.Record, 100)
				last := record.Record{}
				for _, rec := range buf[:r.Next(buf)] {
					if rec.Kind == record.KindComm {
						last = rec
					}
				}
				if last.Code != uint8(record.CommAborted) || last.Result != s.Fault || last.Peer != s.FaultPeer || last.Value != s.ID {
					t.Errorf("rank %d: its last word of the communicator is %+v", c.Rank(), last)
				}
				return errExpected
			})
		})
	}
}

// TestNobodyEndsBeforeTheLastHasBegun: threads are preempted anywhere, and still no rank's
// record ends before another one's begins. Clocks of nodes are aligned by that.
func TestNobodyEndsBeforeTheLastHasBegun(t *testing.T) {
	const n, ops = 3, 2000
	// The kernel takes threads off their processors wherever they are.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4 * runtime.NumCPU()))
	_, records := recorded(t, n, n, func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), ccl.Of(make([]float32, 2))
		for range ops {
			if err := do(ctx, s, c.AllReduce(s, x, x, ccl.Sum)); err != nil {
				return err
			}
		}
		return nil
	})
	begin, end := map[uint64]int64{}, map[uint64]int64{}
	for r := range records {
		for _, rec := range records[r] {
			if rec.Kind != record.KindWhole {
				continue
			}
			begin[rec.Seq] = max(begin[rec.Seq], rec.Mono-rec.Dur)
			if e, ok := end[rec.Seq]; !ok || rec.Mono < e {
				end[rec.Seq] = rec.Mono
			}
		}
	}
	if len(begin) < ops {
		t.Fatalf("%d operations recorded", len(begin))
	}
	for seq := range begin {
		if begin[seq] > end[seq] {
			t.Errorf("operation %d: the last rank begins %d ns after the first has ended", seq, begin[seq]-end[seq])
		}
	}
}

// TestNoRoomForARecorder: a rank that can make no flight recorder goes on without.
func TestNoRoomForARecorder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// Beneath a file there is room for no directory, nor for another one beside it.
	dir := filepath.Join(file, "runtime")
	for k, v := range map[string]string{
		"LOCKSTEP_RANK": "0", "LOCKSTEP_WORLD_SIZE": "1", "LOCKSTEP_COMM_ID": freeID(t).String(), "LOCKSTEP_RUNTIME_DIR": dir, "LOCKSTEP_DEVICE": "cpu",
	} {
		t.Setenv(k, v)
	}
	cfg, err := ccl.ConfigFromEnv()
	if err != nil {
		t.Fatal(err)
	}
	if err := cfg.Prepare(); err != nil || cfg.Recorder != nil {
		t.Fatalf("recorder %v, %v", cfg.Recorder.Path(), err)
	}
}

// TestRecorderTellsPeers: of an operation that takes long the recorder has what each peer sent, by phase: from whom it came,
// and that a rank had to wait when another was late. The times lie within the operation's.
func TestRecorderTellsPeers(t *testing.T) {
	const n, late = 4, 20 * time.Millisecond
	for _, per := range []int{n, 2} {
		t.Run(fmt.Sprintf("%d a node", per), func(t *testing.T) {
			dir := t.TempDir()
			_, records := recordedIn(t, dir, n, per, func(ctx context.Context, c *ccl.Comm) error {
				s, x := c.NewStream(), ccl.Of(make([]float32, 1<<19))
				if c.Rank() == 1 {
					if err := untilToldOf(ctx, dir, 1); err != nil {
						return err
					}
					time.Sleep(late)
				}
				return do(ctx, s, c.AllReduce(s, x, x, ccl.Sum))
			})
			for rank, recs := range records {
				var legs []record.Record
				for _, r := range recs {
					switch r.Kind {
					case record.KindPhase:
						legs = append(legs, r)
					case record.KindWhole:
						checkLegs(t, n, rank, legs, r)
						legs = nil
					}
				}
			}
			waited := int64(0)
			for _, r := range records[0] {
				if r.Kind == record.KindPhase {
					waited += r.Wait + r.Stall
				}
			}
			if waited < int64(late/2) {
				t.Errorf("rank 0 has waited for %v, rank 1 was %v late", time.Duration(waited), late)
			}
		})
	}
}

// checkLegs checks what peers sent of an AllReduce of n ranks, by its record.
func checkLegs(t *testing.T, n, rank int, legs []record.Record, op record.Record) {
	t.Helper()
	phases := map[record.PhaseCode]bool{}
	began := op.Mono - op.Dur - 2000 // a length of over 2.1 s is to the microsecond
	for _, l := range legs {
		phases[record.PhaseCode(l.Code)] = true
		if l.Seq != op.Seq || l.Peer < 0 || int(l.Peer) >= n || int(l.Peer) == rank || l.Dur < 0 || l.Wait < 0 || l.Stamp > op.Mono || l.Stamp-l.Dur-l.Wait < began {
			t.Errorf("rank %d: %+v of %+v", rank, l, op)
		}
	}
	if !phases[record.PhaseReduce] || !phases[record.PhaseReceive] {
		t.Errorf("rank %d: legs %+v of %+v", rank, legs, op)
	}
}
