package transport

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
)

// recall is what a sender's monitor made of a network that turned slow.
type recall struct {
	healthy, ill windowmon.Stats // windows before, and from then on
	event, state time.Duration   // until the estimate and the state turned bad
	requests     int             // until the latter
	found        bool
}

func (r recall) String() string {
	share := func(s windowmon.Stats) string {
		n := float64(max(s.Windows, 1)) / 100
		return fmt.Sprintf("%d windows, network %.1f%%, receiver %.1f%%, starved %.1f%%", s.Windows, float64(s.ByCause[windowmon.Network])/n, float64(s.ByCause[windowmon.ReceiverNotReady])/n, float64(s.ByCause[windowmon.CPUStarved])/n)
	}
	return fmt.Sprintf("healthy: %s; slow: %s; found after %v (event), %v (state), %d requests", share(r.healthy), share(r.ill), r.event.Round(time.Millisecond), r.state.Round(time.Millisecond), r.requests)
}

// recallOf has rank 0 send to rank 1 over TCP, one message after the other, some on a healthy
// network and then others on an ill one, until the monitor has found it. A busy receiver computes
// now and then, for as long as a host takes that has fewer cores than ranks, and looks at nothing.
func recallOf(t *testing.T, busy bool, network func(ill bool) error) (got recall) {
	const size, healthy = 96 << 10, 300
	done := make(chan struct{})
	var writers [2]*record.Writer
	var comms [2]*record.Comm
	for r := range writers {
		w, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "j", Rank: int32(r)}})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		writers[r] = w
		comms[r], _ = w.AddComm(record.CommEntry{ID: 1, Name: "test", Rank: int32(r), Size: 2})
	}
	goroutines(t, apart, 2, func(c *Config) {
		c.Window, c.Recorder, c.Comm = 256<<10, writers[c.Rank], comms[c.Rank]
	}, func(m *Mesh, rank, _ int) error {
		l, err := m.Link(1 - rank)
		if err != nil {
			return err
		}
		b := make([]byte, size)
		if rank == 1 {
			rng := rand.New(rand.NewPCG(1, 19))
			for {
				select {
				case <-done:
					return nil
				default:
				}
				n, err := l.TryRecv(b)
				if err != nil {
					return err
				}
				if n == 0 {
					m.Wait(5 * time.Millisecond)
					continue
				}
				l.Flush(record.Now())
				if busy && rng.IntN(3) == 0 {
					time.Sleep(time.Duration(rng.ExpFloat64() * float64(2*time.Millisecond)))
				}
			}
		}
		defer close(done)
		link := l.(*tcpLink)
		request := func() error {
			if err := sendAll(m, l, b); err != nil {
				return err
			}
			return eventually(m, "the message is taken", func() bool { return link.completed() >= link.posted() })
		}
		for range healthy {
			if err := request(); err != nil {
				return err
			}
		}
		mon := &link.meter.mon
		got.healthy = mon.Stats()
		events, from := mon.Events(), time.Now()
		if err := network(true); err != nil {
			return err
		}
		for !got.found && err == nil && time.Since(from) < patience/2 {
			got.requests++
			if err = sendAll(m, l, b); err != nil {
				break
			}
			err = eventually(m, "the message is taken, or the network found to be slow", func() bool {
				if got.event == 0 && mon.Events() != events {
					got.event = time.Since(from)
				}
				got.found = mon.State() == windowmon.Network
				return got.found || link.completed() >= link.posted()
			})
		}
		got.state, got.ill = time.Since(from), mon.Stats()
		got.ill.Windows -= got.healthy.Windows
		for c := range got.ill.ByCause {
			got.ill.ByCause[c] -= got.healthy.ByCause[c]
		}
		return errors.Join(err, network(false))
	})
	return got
}

// TestSlowWireIsFound: the kernel's own network, in a namespace, turns slow. The monitor finds it,
// beside a receiver that is often late, too, and for as long as it was healthy it did not.
func TestSlowWireIsFound(t *testing.T) {
	const inside = "TRANSPORT_TEST_NETNS"
	if os.Getenv(inside) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestSlowWireIsFound$", "-test.v", "-test.count=1")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil || bytes.Contains(out, []byte("--- SKIP: TestSlowWireIsFound (")) {
			t.Skipf("no network of its own: %v: %s", err, out)
		}
		if t.Logf("%s", out); err != nil {
			t.Error(err)
		}
		return
	}
	try := func(command string) error {
		args := strings.Fields(command)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "_", " ") // of bytecode
		}
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", command, err, out)
		}
		return nil
	}
	// tc(8)'s classic BPF: a random number (SKF_AD_OFF + SKF_AD_RANDOM) below this is TC_ACT_SHOT, all else TC_ACT_UNSPEC.
	lose := func(share float64) string {
		return fmt.Sprintf("tc filter replace dev lo parent ffff: protocol ip pref 1 bpf direct-action bytecode 4,32_0_0_%d,37_1_0_%d,6_0_0_2,6_0_0_4294967295",
			uint32(0xfffff000+56), uint32(share*math.MaxUint32))
	}
	none := "tc filter del dev lo parent ffff: pref 1"
	wires := []struct{ name, ill, well string }{
		{"4 Mbit/s", "tc qdisc replace dev lo root tbf rate 4mbit burst 64k latency 2s", "tc qdisc del dev lo root"},
		{"a fifth of the packets lost", lose(0.2), none},
		{"all packets lost", lose(1), none},
	}
	if err := errors.Join(try("ip link set lo up mtu 9000"), try("tc qdisc add dev lo ingress")); err != nil {
		t.Skip(err)
	}
	for _, w := range wires {
		if err := errors.Join(try(w.ill), try(w.well)); err != nil {
			t.Skip(err) // this kernel's tc lacks it
		}
		for _, busy := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, receiver busy %v", w.name, busy), func(t *testing.T) {
				got := recallOf(t, busy, func(ill bool) error {
					if ill {
						return try(w.ill)
					}
					return try(w.well)
				})
				t.Log(got)
				if !got.found {
					t.Error("the slow network was not found")
				}
			})
		}
	}
}
