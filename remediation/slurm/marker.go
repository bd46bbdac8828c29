package slurm

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// marker is what actuator and loop tell each other. It stands in the job's comment, after
// what the user wrote there:
//
//	[lockstep/1 nodes=4 do=go action=5e1f attempt=102 without=n3,n7]
//
// The loop writes it once, when it starts, with the nodes that a step needs; from then on
// the actuator alone does. Without lists all nodes that a step of this job is to leave
// out, also those of former actions.
type marker struct {
	nodes   int // that a step needs
	do      do
	action  string
	attempt int // the attempt that ends, by do
	without []string
}

// do is what the loop shall do when the step of the marker's attempt has ended.
type do string

const (
	doNothing do = "none"
	doWait    do = "wait" // for the word to go: the attempt is being fenced
	doGo      do = "go"
)

const (
	maxComment = 4000 // bytes, of which the user's part is left as it is
	maxWithout = 64
)

var markerText = regexp.MustCompile(`\s*\[lockstep/1 ([^\[\]]*)\]`)

// parseMarker finds the marker in a comment; ok is false when there is none, or one that
// is not to be understood.
func parseMarker(comment string) (m marker, ok bool) {
	found := markerText.FindStringSubmatch(comment)
	if found == nil {
		return marker{}, false
	}
	m = marker{do: doNothing, attempt: -1}
	for _, f := range strings.Fields(found[1]) {
		k, v, _ := strings.Cut(f, "=")
		var err error
		switch k {
		case "nodes":
			m.nodes, err = strconv.Atoi(v)
		case "attempt":
			m.attempt, err = strconv.Atoi(v)
		case "do":
			m.do = do(v)
		case "action":
			if m.action = v; !actionID.MatchString(v) {
				return marker{}, false
			}
		case "without":
			m.without = strings.Split(v, ",")
		} // what a later version adds is not for us
		if err != nil {
			return marker{}, false
		}
	}
	bad := slices.ContainsFunc(m.without, func(n string) bool { return !nodeName.MatchString(n) })
	if bad || m.nodes < 1 || m.nodes > maxTasks || len(m.without) > maxWithout || m.attempt < -1 || m.attempt > maxAttempt ||
		!slices.Contains([]do{doNothing, doWait, doGo}, m.do) {
		return marker{}, false
	}
	return m, true
}

func (m marker) String() string {
	s := fmt.Sprintf("[lockstep/1 nodes=%d do=%s", m.nodes, m.do)
	if m.action != "" {
		s += " action=" + m.action
	}
	if m.attempt >= 0 {
		s += fmt.Sprintf(" attempt=%d", m.attempt)
	}
	if len(m.without) > 0 {
		s += " without=" + strings.Join(m.without, ",")
	}
	return s + "]"
}

// into puts the marker into a comment, in the place of an older one.
func (m marker) into(comment string) (string, error) {
	if len(m.without) > maxWithout {
		return "", fmt.Errorf("slurm: %d nodes to leave out, at most %d", len(m.without), maxWithout)
	}
	s := strings.TrimSpace(markerText.ReplaceAllLiteralString(comment, ""))
	if s != "" {
		s += " "
	}
	if s += m.String(); len(s) > maxComment {
		return "", fmt.Errorf("slurm: the job's comment would have %d bytes with ours, at most %d", len(s), maxComment)
	}
	return s, nil
}

// union is a and what of b is not in it, in order.
func union(a, b []string) []string {
	u := slices.Clone(a)
	for _, n := range b {
		if !slices.Contains(u, n) {
			u = append(u, n)
		}
	}
	return u
}

// minus is a without what is in b.
func minus(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(n string) bool { return slices.Contains(b, n) })
}
