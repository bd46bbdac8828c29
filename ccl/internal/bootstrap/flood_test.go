package bootstrap

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/internal/accept/acceptest"
)

// greetingOf returns a well-formed greeting of a client that does not know the secret.
func greetingOf(token [16]byte) []byte {
	b := append([]byte(magic), byte(version), 0)
	b = append(b, token[:]...)
	nonce := make([]byte, nonceSize)
	rand.Read(nonce)
	return append(b, nonce...)
}

// attackers returns the kinds of unauthenticated peers. Some know the rendezvous's ID.
func attackers(id ID) []acceptest.Behaviour {
	return []acceptest.Behaviour{
		acceptest.Silent,
		acceptest.Drips(greetingOf(id.Token)),
		acceptest.Says([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
		acceptest.Says(greetingOf(id.Token)),                                    // without proof
		acceptest.Says(slices.Concat(greetingOf(id.Token), make([]byte, 4096))), // with a wrong one
		acceptest.Says([]byte(magic)),
	}
}

// TestRendezvousUnderFlood: ranks join, communicate and regroup while unauthenticated connections
// fill rank 0's listener.
func TestRendezvousUnderFlood(t *testing.T) {
	const ranks, flood = 8, 600
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	counts := ln.hold()
	defer counts.Close()
	f := acceptest.Start(t, id.Addr, flood, attackers(id)...)
	for range 5 { // members that stall after their proof
		if conn, err := net.Dial("tcp", id.Addr); err == nil {
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			clientHandshake(conn, secret, version, id.Token)
		}
	}
	controls, errs := meet(t, ln, id, ranks)
	defer leaveAll(controls)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	ctx := testContext(t)
	if err := each(controls, func(c *Control) error { return c.Barrier(ctx) }); err != nil {
		t.Fatal(err)
	}
	// A member that has lost its connection reconnects during the flood.
	p := controls[1].peers[0]
	p.mu.Lock()
	p.conn.Close()
	p.mu.Unlock()
	if err := each(controls, func(c *Control) error { return c.Barrier(ctx) }); err != nil {
		t.Fatal(err)
	}
	members := make([]int, ranks)
	for i := range members {
		members[i] = i
	}
	again := make([]*Control, ranks)
	err = each(controls, func(c *Control) (err error) {
		again[c.rank], err = c.Regroup(ctx, members, c.rank, "again")
		return err
	})
	defer leaveAll(again)
	if err != nil {
		t.Fatal(err)
	}
	f.Stop()
	got := counts.Refused()
	for deadline := time.Now().Add(time.Minute); got.Refused[accept.Unproved] == 0 && time.Now().Before(deadline); got = counts.Refused() {
		time.Sleep(time.Millisecond) // the listener may notice later that they hung up
	}
	if got.Refused[accept.Garbage] == 0 || got.Refused[accept.Unproved] == 0 {
		t.Errorf("refusals are not counted: %+v of %d made", got, f.Made.Load())
	}
	for _, c := range slices.Concat(controls, again) {
		select {
		case e := <-c.Events():
			t.Errorf("rank %d was told %+v", c.rank, e)
		default:
		}
	}
}

// meet joins ranks of this process through ln.
func meet(t testing.TB, ln *Listener, id ID, ranks int) ([]*Control, []error) {
	return joinAll(t, testContext(t), ranks, func(c *Config) {
		if c.ID = id; c.Listener != nil {
			c.Listener.Close()
			c.Listener = ln
		}
	})
}

// TestReplayedGreeting: a client that replays a member's greeting and proof gets the server's
// challenge and no more. It counts as unauthenticated.
func TestReplayedGreeting(t *testing.T) {
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	id := ln.NewID()
	tap := &tapped{}
	conn, err := net.Dial("tcp", ln.Addr())
	if err != nil {
		t.Fatal(err)
	}
	tap.Conn = conn
	tap.SetDeadline(time.Now().Add(20 * time.Second))
	if err := clientHandshake(tap, secret, version, id.Token); err != nil {
		t.Fatal(err)
	}
	tap.Close()
	for range 3 {
		conn, err := net.Dial("tcp", ln.Addr())
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		conn.Write(tap.said) // greeting and proof
		b := make([]byte, answerSize+1)
		n := 0
		for err == nil {
			var m int
			m, err = conn.Read(b[n:])
			n += m
		}
		if n > answerSize {
			t.Errorf("a replayed handshake was answered with %d bytes", n)
		}
		conn.Close()
	}
	if c := ln.Refused(); c.Refused[accept.Replayed] != 3 {
		t.Errorf("%+v", c)
	}
}

// tapped records what is written to a connection.
type tapped struct {
	net.Conn
	said []byte
}

func (c *tapped) Write(b []byte) (int, error) {
	c.said = append(c.said, b...)
	return c.Conn.Write(b)
}

// BenchmarkRendezvous measures how much a flood delays the ranks of a job. The flood comes from
// this process, from other processes while two cores are busy, or from other processes that open
// so many connections at a time (hands) that the kernel's accept queue is always full. With
// elsewhere the flood goes to another listener, which only accepts and closes: that gives its cost
// in CPU time. Run it with -benchtime=20x.
func BenchmarkRendezvous(b *testing.B) {
	for _, tt := range []struct {
		name                          string
		flood, processes, busy, hands int
		elsewhere                     bool
	}{
		{name: "quiet"},
		{name: "busy=2", processes: 0, busy: 2},
		{name: "flood=2000", flood: 2000},
		{name: "flood=2000,processes=4", flood: 2000, processes: 4},
		{name: "flood=2000,processes=4,busy=2", flood: 2000, processes: 4, busy: 2},
		{name: "flood=8000,processes=4,busy=2", flood: 8000, processes: 4, busy: 2},
		{name: "flood=8000,processes=4,busy=2,elsewhere", flood: 8000, processes: 4, busy: 2, elsewhere: true},
		{name: "flood=8000,processes=4,busy=2,hands=1000", flood: 8000, processes: 4, busy: 2, hands: 1000},
		{name: "flood=8000,processes=4,busy=2,hands=1000,elsewhere", flood: 8000, processes: 4, busy: 2, hands: 1000, elsewhere: true},
	} {
		b.Run(tt.name, func(b *testing.B) {
			var all []time.Duration
			for range b.N {
				ln, err := Listen("127.0.0.1:0", secret)
				if err != nil {
					b.Fatal(err)
				}
				id := ln.NewID()
				stop := func() {}
				if tt.processes+tt.busy > 0 {
					target := id
					if tt.elsewhere {
						target.Addr = sink(b)
					}
					stop = floodFrom(b, target, tt.flood, tt.processes, tt.busy, tt.hands)
				} else if tt.flood > 0 {
					stop = acceptest.Start(b, id.Addr, tt.flood, attackers(id)...).Stop
				}
				began := time.Now()
				controls, errs := meet(b, ln, id, 8)
				all = append(all, time.Since(began))
				if err := errors.Join(errs...); err != nil {
					b.Fatal(err)
				}
				stop()
				leaveAll(controls)
			}
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)/2].Microseconds())/1e3, "ms/median")
			b.ReportMetric(float64(all[len(all)-1].Microseconds())/1e3, "ms/worst")
		})
	}
}

// floodEnv tells the test binary to flood the rendezvous of an ID, to keep a core busy, or to be a
// sink.
const floodEnv = "BOOTSTRAP_TEST_FLOOD"

// sink starts a process that accepts and closes connections.
func sink(b *testing.B) (addr string) {
	c := exec.Command(os.Args[0], "-test.run=^$")
	c.Env = append(os.Environ(), floodEnv+"=sink")
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
	})
	if _, err := fmt.Fscanln(out, &addr); err != nil {
		b.Fatal(err)
	}
	return addr
}

// floodFrom starts processes that flood a rendezvous with n connections, hands at a time (0: the
// default). It also starts busy processes that use up to a core each.
func floodFrom(b *testing.B, id ID, n, processes, busy, hands int) (stop func()) {
	b.Helper()
	var all []*exec.Cmd
	stop = func() {
		for _, c := range all {
			c.Process.Kill()
			c.Wait()
		}
	}
	for i := range processes + busy {
		c := exec.Command(os.Args[0], "-test.run=^$")
		c.Env = append(os.Environ(), floodEnv+"="+id.String(), fmt.Sprint(floodEnv, "_N=", n/max(processes, 1)), fmt.Sprint(floodEnv, "_HANDS=", hands/max(processes, 1)))
		if i >= processes {
			c.Env = append(os.Environ(), floodEnv+"=busy", "GOMAXPROCS=1")
		}
		out, err := c.StdoutPipe()
		if err == nil {
			err = c.Start()
		}
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, c)
		out.Read(make([]byte, 1)) // the process is running
	}
	return stop
}

func floodMain(id string) {
	switch id {
	case "busy":
		fmt.Print(".")
		for { //nolint:staticcheck // it is to keep a core busy
		}
	case "sink":
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		fmt.Println(ln.Addr())
		for {
			if conn, err := ln.Accept(); err == nil {
				conn.Close()
			}
		}
	}
	to, err := ParseID(id)
	if err != nil {
		panic(err)
	}
	n, _ := strconv.Atoi(os.Getenv(floodEnv + "_N"))
	if hands, _ := strconv.Atoi(os.Getenv(floodEnv + "_HANDS")); hands > 0 {
		acceptest.BeginBy(hands, to.Addr, n, attackers(to)...)
	} else {
		acceptest.Begin(to.Addr, n, attackers(to)...)
	}
	fmt.Print(".")
	select {}
}
