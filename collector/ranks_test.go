package collector_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

const commID = 0xfeed

// ranks writes the recorders of a small job, in this process's name.
type ranks struct {
	w      []*record.Writer
	comms  []*record.Comm
	conns  []*record.Conn
	seq    uint64
	sent   []uint64
	remote *remote // the job's last rank, nil when all are here
}

func newRanks(t testing.TB, dir string, n int, attempt uint32) *ranks {
	t.Helper()
	r := &ranks{sent: make([]uint64, n)}
	for i := range n {
		w, c, k, err := createRank(dir, i, n, attempt)
		if err != nil {
			t.Fatal(err)
		}
		r.w, r.comms, r.conns = append(r.w, w), append(r.comms, c), append(r.conns, k)
	}
	t.Cleanup(r.close)
	return r
}

// createRank makes a recorder with one communicator of the whole job and a
// connection to the next rank.
func createRank(dir string, rank, size int, attempt uint32) (*record.Writer, *record.Comm, *record.Conn, error) {
	w, err := record.Create(record.Options{Dir: dir, Identity: record.Identity{
		Job: "job", Node: "node", Rank: int32(rank), WorldSize: int32(size), LocalRank: int32(rank), Attempt: attempt,
	}})
	if err != nil {
		return nil, nil, nil, err
	}
	c, _ := w.AddComm(record.CommEntry{ID: commID + uint64(attempt), Name: "dp", Rank: int32(rank), Size: int32(size), State: record.CommJoined})
	k, _ := w.AddConn(record.ConnEntry{Comm: c.Index(), Peer: int32((rank + 1) % size), Transport: record.TransportTCP, Name: fmt.Sprintf("tcp %d", rank)})
	return w, c, k, nil
}

func (r *ranks) close() {
	for _, w := range r.w {
		w.Close()
	}
}

const opBytes = 1 << 20

// enter and leave are one rank's part in one AllReduce.
func (r *ranks) enter(i int, seq uint64) {
	now := record.Now()
	r.w[i].Append(&record.Record{Kind: record.KindEnqueue, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Coll: record.AllReduce, DType: record.Float32, Bytes: opBytes, Root: -1})
	r.comms[i].Enqueued(seq, now, record.AllReduce, opBytes)
	r.w[i].Append(&record.Record{Kind: record.KindStart, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Coll: record.AllReduce, Algo: record.AlgoRing, Proto: record.ProtoSimple, Stamp: now})
	r.comms[i].Started(seq, now)
}

func (r *ranks) leave(i int, seq uint64, took time.Duration) {
	now := record.Now()
	r.sent[i] += opBytes
	r.conns[i].Posted(r.sent[i], now)
	r.conns[i].Completed(r.sent[i], now)
	r.w[i].Append(&record.Record{Kind: record.KindPhase, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Code: uint8(record.PhaseWait), Dur: int64(took) / 4, Stamp: now})
	r.w[i].Append(&record.Record{Kind: record.KindPhase, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Code: uint8(record.PhaseTransfer), Dur: int64(took) / 2, Stamp: now})
	r.w[i].Append(&record.Record{Kind: record.KindEnd, Mono: now, Comm: r.comms[i].Index(), Seq: seq, Coll: record.AllReduce, Stamp: now})
	r.comms[i].Finished(seq, now)
	r.comms[i].AddPhases(int64(time.Millisecond), int64(took)/4, int64(took)/2, opBytes)
}

// step is one AllReduce of all ranks.
func (r *ranks) step() {
	r.seq++
	for i := range r.w {
		r.enter(i, r.seq)
	}
	if r.remote != nil {
		r.remote.take(r.seq)
		if err := r.remote.done(); err != nil {
			return // it was killed: the others stay inside
		}
	}
	time.Sleep(time.Millisecond)
	for i := range r.w {
		r.leave(i, r.seq, time.Millisecond)
	}
}

// steps runs until stop is called.
func (r *ranks) steps() (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			default:
				r.step()
			}
		}
	}()
	return sync.OnceFunc(func() { close(quit); <-done })
}

// newSplitRanks makes a job of n ranks whose last one is a process of its own.
func newSplitRanks(t testing.TB, dir string, n int) *ranks {
	t.Helper()
	r := &ranks{sent: make([]uint64, n-1)}
	for i := range n - 1 {
		w, c, k, err := createRank(dir, i, n, 0)
		if err != nil {
			t.Fatal(err)
		}
		r.w, r.comms, r.conns = append(r.w, w), append(r.comms, c), append(r.conns, k)
	}
	t.Cleanup(r.close)
	r.remote = spawn(t, "rank", "LOCKSTEP_TEST_DIR="+dir, fmt.Sprint("LOCKSTEP_TEST_SIZE=", n))
	return r
}
