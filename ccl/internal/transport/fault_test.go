package transport

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// faultSet is Faults for a test: what is wrong from rank 0 to rank 1.
type faultSet struct {
	version atomic.Uint64
	mu      sync.Mutex
	fault   Fault
}

func (f *faultSet) set(fault Fault) {
	f.mu.Lock()
	f.fault = fault
	f.mu.Unlock()
	f.version.Add(1)
}

func (f *faultSet) Version() uint64 { return f.version.Load() }
func (f *faultSet) Conn(comm string, src, dst int) Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	if comm != "test" || src != 0 || dst != 1 {
		return Fault{}
	}
	return f.fault
}
func (f *faultSet) Entry(string) time.Duration { return 0 }

// recorder is rank 0's in a communicator of so many ranks, and who reads it.
func recorder(t *testing.T, size int) (*record.Writer, *record.Comm, *record.Reader) {
	w, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "j"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	r, err := record.Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	comm, _ := w.AddComm(record.CommEntry{ID: 1, Name: "test", Size: int32(size)})
	return w, comm, r
}

// withRecorder runs two ranks; rank 0 has a recorder, which read reads.
func withRecorder(t *testing.T, p place, faults Faults, f func(m *Mesh, rank int, read func() record.ConnStatus) error) {
	w, comm, r := recorder(t, 2)
	goroutines(t, p, 2, func(c *Config) {
		c.Window, c.Ring = 256<<10, 256<<10
		if c.Rank == 0 {
			c.Recorder, c.Comm, c.Faults = w, comm, faults
		}
	}, func(m *Mesh, rank, _ int) error {
		return f(m, rank, func() record.ConnStatus {
			var sum record.ConnStatus // RDMA has an entry for each path
			for _, c := range r.Conns(nil) {
				sum.Posted += c.Posted
				sum.Completed += c.Completed
				sum.TxBlockedSince = max(sum.TxBlockedSince, c.TxBlockedSince)
			}
			return sum
		})
	})
}

// eventually polls cond while the rank waits, as an executor in a collective does.
func eventually(m *Mesh, what string, cond func() bool) error {
	for deadline := time.Now().Add(patience); !cond(); {
		if time.Now().After(deadline) {
			return fmt.Errorf("never: %s", what)
		}
		m.Wait(5 * time.Millisecond)
	}
	return nil
}

func TestStallHoldsBytesBack(t *testing.T) {
	for _, p := range []place{oneNode, apart, overRDMA} {
		t.Run(string(p), func(t *testing.T) {
			faults := new(faultSet)
			faults.set(Fault{Stall: true})
			taken := make(chan int, 1)
			cleared := make(chan struct{})
			withRecorder(t, p, faults, func(m *Mesh, rank int, read func() record.ConnStatus) error {
				l, err := m.Link(1 - rank)
				if err != nil {
					return err
				}
				b := make([]byte, 1<<20)
				if rank == 0 {
					fill(b, 0, 1, 0)
					sent := 0
					err := eventually(m, "the credit is used up", func() bool {
						n, err := l.TrySend(b[sent:])
						if err != nil {
							t.Error(err)
						}
						sent += n
						return sent >= 256<<10
					})
					if err != nil {
						return err
					}
					// A stalled network, as the recorder tells it: posted, not
					// completed, and the receiver not at fault.
					if err := eventually(m, "bytes outstanding are recorded", func() bool {
						c := read()
						return c.Posted == uint64(sent) && c.Completed == 0
					}); err != nil {
						return err
					}
					if c := read(); c.TxBlockedSince != 0 {
						t.Errorf("the receiver is blamed: blocked since %d", c.TxBlockedSince)
					}
					if m.Settled() {
						t.Error("settled with bytes held back")
					}
					taken <- sent
					<-cleared
					if err := sendAll(m, l, b[sent:]); err != nil {
						return err
					}
					if err := eventually(m, "completion", func() bool { c := read(); return c.Completed == 1<<20 }); err != nil {
						return err
					}
					_, _, err = readLine(m, l, b)
					return err
				}
				<-taken
				for range 1000 {
					if n, err := l.TryRecv(b); n > 0 || err != nil {
						return fmt.Errorf("%d bytes passed a stalled connection, %w", n, err)
					}
					m.Wait(0)
				}
				faults.set(Fault{})
				close(cleared)
				if err := recvAll(m, l, b); err != nil {
					return err
				}
				for i := range b {
					if b[i] != pattern(0, 1, uint64(i)) {
						return fmt.Errorf("wrong byte %d", i)
					}
				}
				if err := writeLine(m, l, nil, 0); err != nil {
					return err
				}
				m.Wait(0)
				return nil
			})
		})
	}
}

func TestThrottleAndDelay(t *testing.T) {
	for _, p := range []place{oneNode, apart, overRDMA} {
		for _, f := range []Fault{{BytesPerSecond: 4 << 20}, {Delay: 60 * time.Millisecond}} {
			t.Run(fmt.Sprintf("%s/%+v", p, f), func(t *testing.T) {
				faults := new(faultSet)
				faults.set(f)
				const size = 512 << 10 // two credits' worth
				withRecorder(t, p, faults, func(m *Mesh, rank int, read func() record.ConnStatus) error {
					l, err := m.Link(1 - rank)
					if err != nil {
						return err
					}
					b := make([]byte, size)
					if rank == 1 {
						start := time.Now()
						if err := recvAll(m, l, b); err != nil {
							return err
						}
						if took := time.Since(start); took < 50*time.Millisecond {
							return fmt.Errorf("512 KiB came in %v", took)
						}
						return writeLine(m, l, nil, 0)
					}
					if err := sendAll(m, l, b); err != nil {
						return err
					}
					if err := eventually(m, "settled", m.Settled); err != nil {
						return err
					}
					_, _, err = readLine(m, l, b)
					return err
				})
			})
		}
	}
}

func TestDropFailsBothSides(t *testing.T) {
	for _, p := range []place{oneNode, apart, overRDMA} {
		t.Run(string(p), func(t *testing.T) {
			faults := new(faultSet)
			withRecorder(t, p, faults, func(m *Mesh, rank int, _ func() record.ConnStatus) error {
				l, err := m.Link(1 - rank)
				if err != nil {
					return err
				}
				var b [LinePayload]byte
				if rank == 0 {
					if _, _, err := readLine(m, l, b[:]); err != nil { // it is up
						return err
					}
					faults.set(Fault{Drop: true})
					if err := sendAll(m, l, b[:]); !errors.Is(err, ErrDropped) {
						return fmt.Errorf("send: %w", err)
					}
					return nil
				}
				if err := writeLine(m, l, b[:], 0); err != nil {
					return err
				}
				err = recvAll(m, l, b[:])
				if err == nil || errors.Is(err, errPatience) {
					return fmt.Errorf("receive: %w", err)
				}
				if _, err := l.TrySend(b[:]); err == nil {
					return errors.New("send over a dropped connection")
				}
				return nil
			})
		})
	}
}

// A receiver that does not take what is there is what the sender's recorder blames.
func TestReceiverNotReady(t *testing.T) {
	for _, p := range []place{oneNode, apart, overRDMA} {
		t.Run(string(p), func(t *testing.T) {
			blamed, done := make(chan struct{}), make(chan struct{})
			withRecorder(t, p, nil, func(m *Mesh, rank int, read func() record.ConnStatus) error {
				l, err := m.Link(1 - rank)
				if err != nil {
					return err
				}
				b := make([]byte, 1<<20)
				if rank == 1 {
					if p != oneNode { // somebody must read the sockets
						for waiting := true; waiting; {
							select {
							case <-blamed:
								waiting = false
							default:
								m.Wait(time.Millisecond)
							}
						}
					} else {
						<-blamed
					}
					l.WantRecv(record.Now())
					if err := recvAll(m, l, b); err != nil {
						return err
					}
					l.Flush(record.Now())
					for { // the last few bytes' credit is given by a rank that has time
						select {
						case <-done:
							return nil
						default:
							m.Wait(time.Millisecond)
						}
					}
				}
				defer close(done)
				sent := 0
				if err := eventually(m, "the receiver is blamed", func() bool {
					n, err := l.TrySend(b[sent:])
					if err != nil {
						t.Error(err)
					}
					sent += n
					return read().TxBlockedSince != 0
				}); err != nil {
					return err
				}
				// Over RDMA what the peer's NIC has is complete.
				if c := read(); c.Posted != 256<<10 || c.Completed != map[bool]uint64{true: c.Posted}[p == overRDMA] {
					t.Errorf("%d bytes posted, %d completed", c.Posted, c.Completed)
				}
				close(blamed)
				if err := sendAll(m, l, b[sent:]); err != nil {
					return err
				}
				return eventually(m, "all has completed and nobody is blamed", func() bool {
					c := read()
					return c.Completed == 1<<20 && c.Posted == 1<<20 && c.TxBlockedSince == 0
				})
			})
		})
	}
}
