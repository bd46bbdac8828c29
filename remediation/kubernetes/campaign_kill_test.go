package kubernetes

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Who is killed, in the middle of an action.
const (
	theRemediator = "remediator"
	theServer     = "API server"
	theMaster     = "master"
	theAgent      = "agent"
)

var victims = []string{theRemediator, theServer, theMaster, theAgent}

// What the remediator does, at which somebody may die.
const (
	atRequest  = "request"         // to the API server
	atWrite    = "write"           // the same, one that changes something: most only look
	atQuestion = "incident"        // of the master
	atFence    = "proof of an end" // by the master, of an agent
)

// doom is somebody's death at one of the next things that the remediator asks: before that is
// heard, or before its answer is.
type doom struct {
	whom   string
	at     string
	left   int
	after  bool
	down   time.Duration
	forget bool // a master: the last incident was not on its disk yet
}

// deaths are those that are to come, and those that were.
type deaths struct {
	c *campaign

	mu    sync.Mutex
	next  []*doom
	until map[string]time.Time // who is away
	n     map[string]int       // by whom
	at    map[string]int       // by whom, and at what
}

func newDeaths(c *campaign) *deaths {
	return &deaths{c: c, until: map[string]time.Time{}, n: map[string]int{}, at: map[string]int{}}
}

func (d *deaths) plan(x *doom) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next = append(slices.DeleteFunc(d.next, func(o *doom) bool { return o.whom == x.whom }), x)
}

// call off those that have not come.
func (d *deaths) callOff() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next = nil
}

// struck counts a request or a question, and returns who dies of it.
func (d *deaths) struck(at, what string) (now []*doom) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next = slices.DeleteFunc(d.next, func(x *doom) bool {
		if x.at != at {
			return false
		}
		if x.left--; x.left >= 0 {
			return false
		}
		d.n[x.whom]++
		d.at[x.whom+" at: "+what]++
		d.until[x.whom] = time.Now().Add(x.down)
		now = append(now, x)
		return true
	})
	return now
}

func (d *deaths) away(whom string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return time.Now().Before(d.until[whom])
}

// absent is somebody who was killed and is not back yet.
func (d *deaths) absent() string {
	for _, v := range victims {
		if d.away(v) {
			return v
		}
	}
	return ""
}

// all is how many were killed.
func (d *deaths) all() (n int) {
	for _, v := range victims {
		n += d.count(v)
	}
	return n
}

func (d *deaths) count(whom string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.n[whom]
}

// least is who has been killed least often, and how often.
func (d *deaths) least(of []string) (whom string, n int) {
	for _, v := range of {
		if m := d.count(v); whom == "" || m < n {
			whom, n = v, m
		}
	}
	return whom, n
}

func (d *deaths) summary() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return fmt.Sprint(d.n)
}

func (d *deaths) tell() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var lines []string
	for _, k := range slices.Sorted(maps.Keys(d.at)) {
		lines = append(lines, fmt.Sprintf("%-60s %d", k, d.at[k]))
	}
	return fmt.Sprintf("killed: %v\n%s", d.n, strings.Join(lines, "\n"))
}

// whatOf is a request in a few words.
func whatOf(r *http.Request) string {
	verb, _, resource, _ := requestOf(r)
	return verb + " " + resource
}

// dooms plans a death for the coming fault: of who was killed least often. It returns what
// kind of fault the victim has a part in, "" for any.
func (c *campaign) dooms() (fault string) {
	if len(c.victims) == 0 {
		if c.rnd.IntN(8) == 0 {
			c.deaths.plan(&doom{whom: theRemediator, at: atRequest, left: c.rnd.IntN(40), after: c.rnd.IntN(2) == 0})
		}
		return ""
	}
	whom, _ := c.deaths.least(c.victims)
	x := &doom{whom: whom, at: atRequest, left: c.rnd.IntN(30), after: c.rnd.IntN(2) == 0, down: time.Duration(c.rnd.Int64N(int64(c.down))), forget: c.rnd.IntN(3) == 0}
	if c.rnd.IntN(2) == 0 {
		x.at, x.left = atWrite, c.rnd.IntN(8)
	}
	switch whom {
	case theMaster:
		if c.rnd.IntN(2) == 0 {
			x.at, x.left = atQuestion, c.rnd.IntN(2)
		}
	case theAgent: // a cut off node's is asked a few times
		x.at, x.left, fault = atFence, c.rnd.IntN(3), string(cut_)
	}
	c.deaths.plan(x)
	return fault
}

// strike carries deaths out, those that come before or after what they come with.
func (c *campaign) strike(list []*doom, after bool) (whom map[string]bool) {
	whom = map[string]bool{}
	for _, x := range list {
		if x.after != after {
			continue
		}
		whom[x.whom] = true
		switch x.whom {
		case theServer:
			c.bed.killServer(x.down)
		case theMaster:
			if x.forget {
				c.master.forget()
			}
		}
	}
	return whom
}
