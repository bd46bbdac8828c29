package transport

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestEveryTransport: each transport that moves bytes here is run by the tests of all links, and
// the recorder's entries of a link, of which everything behind lives, are of its own transport.
func TestEveryTransport(t *testing.T) {
	var mu sync.Mutex
	run := map[record.Transport]bool{}
	for _, p := range allPlaces {
		t.Run(string(p), func(t *testing.T) {
			const size = 4
			w, comm, r := recorder(t, size)
			goroutines(t, p, size, func(c *Config) {
				if c.Rank == 0 {
					c.Recorder, c.Comm = w, comm
				}
			}, func(m *Mesh, rank, _ int) error {
				if err := exchange(m, rank, size, 3, 20, 64<<10); err != nil || rank != 0 {
					return err
				}
				for peer := 1; peer < size; peer++ {
					l, err := m.Link(peer)
					if err != nil {
						return err
					}
					mu.Lock()
					run[l.Kind()] = true
					mu.Unlock()
					entries := slices.DeleteFunc(r.Conns(nil), func(c record.ConnStatus) bool { return int(c.Peer) != peer })
					if len(entries) == 0 {
						return fmt.Errorf("the recorder has no connection to rank %d", peer)
					}
					for _, c := range entries {
						if c.Transport != l.Kind() || c.Transport.QueuePair() != (c.PeerID != 0) {
							return fmt.Errorf("the link to rank %d is of %v, its entry %+v", peer, l.Kind(), c.ConnEntry)
						}
					}
				}
				return nil
			})
		})
	}
	for k := record.TransportNone + 1; k.Known(); k++ {
		if !k.Stamped() && !run[k] {
			t.Errorf("no place of allPlaces has links of %v", k)
		}
	}
}

// TestRTT: a rank that waits has its kernel tell the round-trip time, over TCP and over nothing else.
func TestRTT(t *testing.T) {
	for _, test := range []struct {
		place place
		told  bool
	}{{apart, true}, {oneNode, false}} {
		t.Run(string(test.place), func(t *testing.T) {
			t.Parallel()
			const rounds, late = 12, 60 * time.Millisecond
			w, comm, r := recorder(t, 2)
			goroutines(t, test.place, 2, func(c *Config) {
				if c.Rank == 0 {
					c.Recorder, c.Comm = w, comm
				}
			}, func(m *Mesh, rank, size int) error {
				told := false
				for i := range rounds {
					if rank == 1 {
						time.Sleep(late) // rank 0 waits, and looks
					}
					if err := exchange(m, rank, size, uint64(i), 20, 16<<10); err != nil {
						return err
					}
					if rank == 0 {
						told = told || slices.ContainsFunc(r.Conns(nil), func(c record.ConnStatus) bool { return c.RTT > 0 })
					}
				}
				if rank == 0 && told != test.told {
					return fmt.Errorf("an RTT was told: %v", told)
				}
				return nil
			})
		})
	}
}
