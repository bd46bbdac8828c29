package diagnosis_test

import (
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// paths gives members 0 and 4 of a communicator over two nodes two paths each
// way, and the link states by the word of rank 0 and of rank 4, ages in seconds.
func (j *job) paths(c *diagnosis.Comm, own, peer [2]record.LinkState, age float64) {
	for path, name := range []string{"rxa0/1->rxb0/1", "rxa1/1->rxb1/1"} {
		for _, end := range []struct {
			src, dst int
			state    record.LinkState
		}{{0, 4, own[path]}, {4, 0, peer[path]}} {
			k := j.conn(c, end.src, end.dst)
			k.Transport, k.Name, k.Link, k.LinkAt = record.TransportRDMA, name, end.state, ago(age-float64(path)/10)
		}
	}
}

// pathsOf breaks the one path of each pair by the word of both.
func (j *job) pathsOf(c *diagnosis.Comm, pairs [][2]int, age float64) {
	for _, p := range pairs {
		for _, end := range [][2]int{p, {p[1], p[0]}} {
			k := j.conn(c, end[0], end[1])
			k.Transport, k.Link, k.LinkAt = record.TransportRDMA, record.LinkDown, ago(age)
		}
	}
}

// heldUp lets all enter an operation so long ago.
func (j *job) heldUp(c *diagnosis.Comm, age float64) {
	for i := range c.Members {
		idleSince(c, i, age+1)
	}
	j.allBut(c, age)
}

func (j *job) onTCP() {
	for i := range j.ev.Conns {
		j.ev.Conns[i].Transport = record.TransportTCP
	}
}

func TestDeadLinks(t *testing.T) {
	up, down, switched := record.LinkUp, record.LinkDown, record.LinkSwitched
	both := [2]record.LinkState{down, down}
	whole := func(j *job) *diagnosis.Comm { return j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7) }
	const dead = "confirmed communication_hang 0>4 link_down"
	for _, c := range []struct {
		name string
		job  func(j *job)
		want string
		why  []string
	}{
		{"one path carries what two did", func(j *job) {
			j.paths(whole(j), [2]record.LinkState{down, switched}, [2]record.LinkState{down, switched}, 5)
		}, "", nil},
		{"the backup broke, the primary is up", func(j *job) {
			j.paths(whole(j), [2]record.LinkState{up, down}, [2]record.LinkState{up, down}, 5)
		}, "", nil},
		{"no path for a moment: the connection looks for one", func(j *job) {
			c := whole(j)
			j.allBut(c, 5)
			j.paths(c, both, both, 4.9)
		}, "suspected communication_hang 0>4 link_down", nil},
		{"no path left", func(j *job) {
			c := whole(j)
			j.allBut(c, 10.6)
			j.paths(c, both, both, 10.5)
		}, dead, []string{"rank 0 and rank 4 have no path left: rdma rxa0/1->rxb0/1 broke at", "rxa1/1->rxb1/1 broke at"}},
		{"a transport that does not look for another path", func(j *job) {
			c := whole(j)
			j.allBut(c, 1.2)
			j.paths(c, both, both, 1)
			for i := range j.ev.Conns {
				j.ev.Conns[i].Transport = record.TransportSHM
			}
		}, dead, nil},
		{"no path left, and they gave up", func(j *job) {
			c := whole(j)
			j.paths(c, both, both, 1)
			for i := range c.Members {
				c.Members[i].State = record.CommAborted
				j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcExited, ago(0.5)
			}
		}, dead, nil},
		{"no path left, and their operation has failed of it", func(j *job) {
			c := whole(j)
			j.paths(c, both, both, 8)
			for i := range c.Members {
				c.Members[i].State, c.Members[i].FinishedAt = record.CommAborted, ago(5.5)
			}
		}, dead, nil},
		{"no path left, and one rank crashed on the error", func(j *job) {
			c := whole(j)
			j.paths(c, both, both, 1)
			for i := range c.Members {
				c.Members[i].State = record.CommAborted
			}
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(0.5)
		}, dead, nil},
		{"one end was killed, the other lost all paths for it", func(j *job) {
			c := whole(j)
			j.allBut(c, 3, 4)
			j.paths(c, both, [2]record.LinkState{up, up}, 1)
			j.ev.Ranks[4].Proc, j.ev.Ranks[4].ProcAt = diagnosis.ProcGone, ago(1)
		}, "confirmed noncommunication_hang 4 process_gone", nil},
		{"one end was killed, whatever both said", func(j *job) {
			c := whole(j)
			j.allBut(c, 3, 4)
			j.paths(c, both, both, 1)
			j.ev.Ranks[4].Proc, j.ev.Ranks[4].ProcAt = diagnosis.ProcGone, ago(1)
		}, "confirmed noncommunication_hang 4 process_gone", nil},
		{"TCP looks for a path for longer", func(j *job) {
			c := whole(j)
			j.heldUp(c, 20)
			j.paths(c, both, both, 19)
			j.onTCP()
		}, "suspected communication_hang 0>4 link_down", nil},
		{"TCP has looked for a path for too long", func(j *job) {
			c := whole(j)
			j.heldUp(c, 32)
			j.paths(c, both, both, 31)
			j.onTCP()
		}, dead, nil},
		{"one end says so, the other is there", func(j *job) {
			c := whole(j)
			j.allBut(c, 5)
			j.paths(c, both, [2]record.LinkState{up, up}, 4)
		}, "suspected communication_hang 0>4 link_down", nil},
		{"one end has just said so, the other may be dying", func(j *job) {
			c := whole(j)
			j.allBut(c, 0.5)
			j.paths(c, both, [2]record.LinkState{up, up}, 0.8)
		}, "", nil},
		{"one end says so, the other is on a node that is not heard", func(j *job) {
			c := whole(j)
			j.allBut(c, 0.5)
			j.paths(c, both, [2]record.LinkState{up, up}, 4)
			j.ev.Nodes[1].LastSeen = ago(4.1)
			j.ev.Nodes[1].Lost = true
		}, "", nil},
		{"both ends said so, and then one's node was not heard", func(j *job) {
			c := whole(j)
			j.allBut(c, 0.5)
			j.paths(c, both, both, 4)
			j.ev.Nodes[1].LastSeen, j.ev.Nodes[1].Lost = ago(3), true
		}, "", nil},
		{"both ends said so, and exit without closing anything", func(j *job) {
			c := whole(j)
			j.paths(c, both, both, 5)
			for i := range c.Members {
				j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcGone, ago(0.8)
			}
		}, dead, nil},
		{"both ends said so, and one was killed later", func(j *job) {
			c := whole(j)
			j.allBut(c, 5, 4)
			j.paths(c, both, both, 5)
			j.ended(4, 0.8, killed)
		}, "confirmed noncommunication_hang 4 process_gone", nil},
		{"all links of one rank", func(j *job) {
			c := whole(j)
			j.heldUp(c, 12)
			j.pathsOf(c, [][2]int{{2, 4}, {2, 5}, {2, 6}}, 11)
		}, "confirmed communication_hang 2 link_down", nil},
		{"all links of one node", func(j *job) {
			j.ev.Ranks[6].Node, j.ev.Ranks[7].Node = 2, 2
			j.ev.Nodes = append(j.ev.Nodes, diagnosis.Node{Name: "node2", LastSeen: now})
			c := whole(j)
			j.heldUp(c, 12)
			j.pathsOf(c, [][2]int{{3, 4}, {5, 6}}, 11)
		}, "confirmed communication_hang node1 link_down", nil},
		{"two links between the same nodes", func(j *job) {
			c := whole(j)
			j.heldUp(c, 12)
			j.pathsOf(c, [][2]int{{3, 4}, {0, 7}}, 11)
		}, "confirmed communication_hang 0>7,3>4 link_down", nil},
		{"the survivors went on without it", func(j *job) {
			j.paths(whole(j), both, both, 5)
			c := j.comm("world.1", 0, 1, 2, 3)
			for i := range c.Members {
				c.Members[i].FinishedAt = ago(0.1)
			}
		}, "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(8)
			c.job(j)
			vs := j.verdicts()
			var got []string
			for i := range vs {
				got = append(got, describe(&vs[i]))
			}
			if s := strings.Join(got, "; "); s != c.want {
				t.Fatalf("got  %q\nwant %q\n%v", s, c.want, vs)
			}
			for _, why := range c.why {
				if !strings.Contains(strings.Join(vs[0].Why, "\n"), why) {
					t.Errorf("no %q in\n%s", why, strings.Join(vs[0].Why, "\n"))
				}
			}
		})
	}
}
