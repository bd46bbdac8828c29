package web

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

func (s *status) json(w http.ResponseWriter, _ *http.Request) {
	answer(w, s.view())
}

// ranks serves where each rank stands.
func (s *status) ranks(w http.ResponseWriter, _ *http.Request) {
	v := s.view()
	if v == nil {
		answer[Status](w, nil)
		return
	}
	answer(w, &Standings{Job: v.Job, At: v.At, Ranks: v.standings})
}

// Standings is what /api/v1/ranks returns. Fields are only ever added.
type Standings struct {
	Job   string     `json:"job"`
	At    time.Time  `json:"at"`
	Ranks []Standing `json:"ranks"` // by world rank
}

func answer[T any](w http.ResponseWriter, v *T) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if v == nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, `{"error":"the master has not published a snapshot yet"}`)
		return
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // an error here is a reader that left
}

//go:embed status.html
var pageSource string

//go:embed runbook.html
var runbookSource string

//go:embed status.css
var styleSheet string

//go:embed status.js
var script string

var pages = func() *template.Template {
	t := template.New("").Funcs(template.FuncMap{
		"clock":   func(t time.Time) string { return t.UTC().Format("15:04:05") },
		"stamp":   func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") },
		"heat":    heat,
		"ratio":   func(r float64) string { return strconv.FormatFloat(r, 'f', 1, 64) },
		"micro":   func(s float64) string { return (time.Duration(s * 1e9)).Round(time.Microsecond).String() },
		"seconds": func(s float64) string { return span(time.Duration(s * 1e9)) },
		"offset":  func(s float64) string { return fmt.Sprintf("%+.1f s", s) },
		"plural": func(n int, one string) string {
			if n == 1 {
				return "1 " + one
			}
			return strconv.Itoa(n) + " " + one + "s"
		},
		"words":  func(s string) string { return strings.ReplaceAll(s, "_", " ") },
		"style":  func() template.CSS { return template.CSS(styleSheet) },
		"script": func() template.JS { return template.JS(script) },
	})
	template.Must(t.New("status").Parse(pageSource))
	return template.Must(t.New("runbook").Parse(runbookSource))
}()

// heat returns the class of a cell by its ratio: the darker, the slower. Red is for what a
// verdict names, and for nothing else.
func heat(ratio float64) string {
	for class, from := range []float64{0, 1.25, 1.5, 2, 4} {
		if ratio < from {
			return "h" + strconv.Itoa(max(class-1, 0))
		}
	}
	return "h4"
}

// Lost is how many nodes the master has lost sight of.
func (s *Status) Lost() (n int) {
	for _, a := range s.Agents {
		if a.State == names.StateLost {
			n++
		}
	}
	return n
}

// Confirmed is how many open incidents may be acted on.
func (s *Status) Confirmed() (n int) {
	for _, in := range s.Open {
		if in.Level == names.LevelConfirmed {
			n++
		}
	}
	return n
}

// Ago says how long before the page was rendered t was.
func (s *Status) Ago(t time.Time) string { return span(s.now.Sub(t)) }

// Lasted says how long a closed incident was open, from its onset.
func (in Incident) Lasted() string { return span(in.Closed.Sub(in.Since)) }

// Strip is the ranks of one node, for the strip of all.
type Strip struct {
	Node  string
	Label string // in words, for who does not see the cells
	Cells []Cell
}

// Cell is one rank in the strip.
type Cell struct {
	Class, Text, Title string
}

// Strips fold the ranks by node, in the order of their first ranks. Of a world that is too
// large to be drawn whole the nodes that have nothing to tell are left out, and counted.
func (s *Status) Strips() (out []Strip) {
	at := map[string]int{}
	counts := map[string]map[string]int{}
	drawn := 0
	for i := range s.standings {
		r := &s.standings[i]
		if len(s.standings) > maxCells && (r.State == StandingMoving && !r.Culprit || drawn >= maxCells) {
			continue
		}
		drawn++
		n, known := at[r.Node]
		if !known {
			n = len(out)
			at[r.Node] = n
			counts[r.Node] = map[string]int{}
			out = append(out, Strip{Node: r.Node})
		}
		c := Cell{Class: r.State}
		if r.Culprit {
			c.Class += " culprit"
		}
		if len(s.standings) <= 256 {
			c.Text = strconv.Itoa(r.Rank)
		}
		if r.State != StandingMoving || r.Culprit {
			c.Title = r.sentence()
		}
		out[n].Cells = append(out[n].Cells, c)
		counts[r.Node][r.State]++
	}
	for i := range out {
		var list []string
		for _, state := range stateOrder {
			if n := counts[out[i].Node][state]; n > 0 {
				list = append(list, fmt.Sprintf("%d %s", n, strings.ReplaceAll(state, "_", " ")))
			}
		}
		out[i].Label = strings.Join(list, ", ")
	}
	return out
}

// Undrawn is how many ranks the strip leaves out.
func (s *Status) Undrawn() int {
	n := len(s.standings)
	for _, strip := range s.Strips() {
		n -= len(strip.Cells)
	}
	return n
}

// sentence says where a rank stands.
func (r *Standing) sentence() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d: %s", r.Rank, strings.ReplaceAll(r.State, "_", " "))
	if r.Seconds > 0 {
		fmt.Fprintf(&b, " for %s", span(time.Duration(r.Seconds*1e9)))
	}
	if r.Collective != "" {
		fmt.Fprintf(&b, ", in %s #%d on %s (its rank %d)", r.Collective, r.Sequence, r.Communicator, r.CommRank)
	}
	if w := r.Whom(); w != "" {
		fmt.Fprintf(&b, ", waits for %s", w)
	}
	if r.WaitsIn != "" {
		fmt.Fprintf(&b, ", waits in %s", r.WaitsIn)
	}
	if r.Culprit {
		b.WriteString(", blamed")
	}
	return b.String()
}

// Told are the communicators that hold somebody up or were given up; Quiet the others.
func (s *Status) Told() (out []Communicator) {
	for _, c := range s.Communicators {
		if c.told && len(out) < maxCommRows {
			out = append(out, c)
		}
	}
	return out
}

// Quiet are the communicators without a story, as far as there is room.
func (s *Status) Quiet() (out []Communicator) {
	for _, c := range s.Communicators {
		if !c.told && len(out) < maxCommRows {
			out = append(out, c)
		}
	}
	return out
}

// ToldConnections are those that are broken or slow now, or were switched; QuietConnections the others.
func (s *Status) ToldConnections() []Connection { return s.connections(true) }

// QuietConnections are the connections with nothing to tell.
func (s *Status) QuietConnections() []Connection { return s.connections(false) }

func (s *Status) connections(told bool) (out []Connection) {
	for _, c := range s.Connections {
		if c.told == told {
			out = append(out, c)
		}
	}
	return out
}

// To names the other end: nobody has told which rank of the job it is before its agent has.
func (c Connection) To() string {
	if c.Destination < 0 {
		return "?"
	}
	return strconv.Itoa(int(c.Destination))
}

// QueuePairs are both ends' numbers, "" where there are none.
func (c Connection) QueuePairs() string {
	switch {
	case c.QueuePair == 0:
		return ""
	case c.PeerQueuePair == 0:
		return strconv.FormatUint(c.QueuePair, 10)
	}
	return fmt.Sprintf("%d → %d", c.QueuePair, c.PeerQueuePair)
}

// Where is the port that it leaves by: NIC, port and rail, else what its transport calls it.
func (c Connection) Where() string {
	if c.NIC == "" {
		return c.Name
	}
	where := fmt.Sprintf("%s/%d", c.NIC, c.Port)
	if c.Rail > 0 {
		where += fmt.Sprintf(", rail %d", c.Rail)
	}
	return where
}

// Moves says what became of its path, "" when it is as it was from the start.
func (c Connection) Moves() string {
	var parts []string
	if c.Switches > 0 {
		parts = append(parts, fmt.Sprintf("took over %d×, %d bytes sent again", c.Switches, c.Resent))
	}
	if c.Outages > 0 {
		parts = append(parts, fmt.Sprintf("out %d×", c.Outages))
	}
	return strings.Join(parts, "; ")
}

// Rate is the last window's in MB/s, "" before there is one.
func (c Connection) Rate() string {
	if c.Bandwidth <= 0 {
		return ""
	}
	return strconv.FormatFloat(c.Bandwidth/1e6, 'f', 1, 64) + " MB/s"
}

// Telling are the matrices that say something; Silent the others.
func (s *Status) Telling() []Matrix { return s.matrices(true) }

// Silent are the matrices that say that nothing is slow.
func (s *Status) Silent() []Matrix { return s.matrices(false) }

func (s *Status) matrices(tells bool) (out []Matrix) {
	for _, m := range s.Delay {
		if m.Tells == tells {
			out = append(out, m)
		}
	}
	return out
}

// Slowest says which connection is the furthest above the median of its kind, "" when none is.
// That is no fault by itself: a pipeline's directions, say, differ in health.
func (s *Status) Slowest() string {
	var worst *Delay
	comm := ""
	for i := range s.Delay {
		if w := s.Delay[i].Worst; len(w) > 0 && (worst == nil || w[0].Ratio > worst.Ratio) {
			worst, comm = &w[0], s.Delay[i].Communicator
		}
	}
	if worst == nil {
		return ""
	}
	return fmt.Sprintf("the longest is %.1f times the median of its kind: rank %d → rank %d on %s", worst.Ratio, worst.SourceWorld, worst.DestinationWorld, comm)
}

// Bad reports whether a verdict blames a connection.
func (m Matrix) Bad(src, dst int) bool { return m.bad[[2]int{src, dst}] }

// Rank names a member by its rank in the world, and in the communicator where these differ.
func (m Matrix) Rank(i int) string {
	switch w := m.World[i]; {
	case w < 0:
		return fmt.Sprintf("? (%d)", i)
	default:
		return strconv.Itoa(int(w))
	}
}

// maxAgentRows bounds the agents that are listed one by one.
const maxAgentRows = 64

// ToldAgents are the agents to be listed: all when they are few, else those that are missed.
func (s *Status) ToldAgents() (out []Agent) {
	for _, a := range s.Agents {
		if (len(s.Agents) <= maxAgentRows || a.State != names.StateConnected) && len(out) < maxAgentRows {
			out = append(out, a)
		}
	}
	return out
}

func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// The page may load nothing but itself again, and run nothing but its own style and script.
var contentPolicy = fmt.Sprintf("default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; style-src '%s'; script-src '%s'",
	digest(styleSheet), digest(script))

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

func secure(w http.ResponseWriter, contentType string) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", contentPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
}

func (s *status) html(w http.ResponseWriter, r *http.Request) {
	refresh := refreshAfter
	if n, err := strconv.Atoi(r.URL.Query().Get("refresh")); err == nil && n >= 0 && n <= 3600 {
		refresh = n
	}
	secure(w, "text/html; charset=utf-8")
	_ = pages.ExecuteTemplate(w, "status", struct { // an error here is a reader that left
		Refresh int
		*Status
	}{refresh, s.view()})
}
