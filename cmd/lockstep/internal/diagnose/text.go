package diagnose

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// printable keeps a recording's names from commanding a terminal.
type printable struct{ w io.Writer }

func (p printable) Write(b []byte) (int, error) {
	clean := bytes.Map(func(c rune) rune {
		if c != '\n' && unicode.IsControl(c) {
			return '?'
		}
		return c
	}, b)
	if _, err := p.w.Write(clean); err != nil {
		return 0, err
	}
	return len(b), nil
}

// text writes the report for people.
func (r *Report) text(w io.Writer, explain bool) {
	fmt.Fprintf(w, "job %s, recorded by lockstep %s: %s from %s", r.Job, orUnknown(r.Program), plural(r.Passes, "pass", "passes"), r.First.Format(time.DateTime))
	fmt.Fprintf(w, ", %s long\n", seconds(r.Last.Sub(r.First).Seconds()))
	if r.Runs > 1 {
		fmt.Fprintf(w, "  the master was started anew %s: what it had learnt was gone then, and is gone here\n", plural(r.Runs-1, "time", "times"))
	}
	if r.Missing > 0 {
		fmt.Fprintf(w, "  %s in between were not recorded, the longest gap is %s: times may differ by as much\n", plural(int(r.Missing), "pass", "passes"), seconds(r.LongestGap))
	}
	if r.HistoryMissing > 0 && (explain || r.Result == "differs") {
		fmt.Fprintf(w, "  the master had watched the job for %s before: what it had learnt by then is missing here, and slowness may be told later or not at all\n", seconds(r.HistoryMissing))
	}
	if r.Damage.Places > 0 {
		fmt.Fprintf(w, "  the file is damaged: %d bytes are left out\n", r.Damage.Bytes)
	}
	if len(r.UnknownSettings) > 0 {
		fmt.Fprintf(w, "  the master had settings that this program does not have: %s\n", strings.Join(r.UnknownSettings, ", "))
	}
	for _, name := range slices.Sorted(maps.Keys(r.Overrides)) {
		fmt.Fprintf(w, "  judged with %s = %s\n", name, r.Overrides[name])
	}
	fmt.Fprintln(w)
	if !slices.ContainsFunc(r.Events, func(e Event) bool { return e.Verdict != nil }) {
		fmt.Fprintln(w, "nothing was found")
	}
	r.timeline(w)
	fmt.Fprintln(w)
	switch r.Result {
	case "identical":
		fmt.Fprintln(w, "RESULT: identical: at each pass the verdicts are those that were recorded")
	case "same":
		fmt.Fprintln(w, "RESULT: same: the verdicts are those that were recorded, not all at the same pass")
	default:
		fmt.Fprintf(w, "RESULT: differs from what was recorded, in %s\n", plural(len(r.Differences), "verdict", "verdicts"))
		for _, d := range r.Differences {
			v := d.Recorded
			if v == nil {
				v = d.Replayed
			}
			fmt.Fprintf(w, "  +%.1fs to +%.1fs  %s, %s: %s\n", d.From, d.To, v.Class, culprits(v), d.What)
		}
	}
	if r.Error != "" {
		fmt.Fprintf(w, "INCOMPLETE: %s\n", r.Error)
	}
}

func orUnknown(s string) string {
	if s == "" {
		return "(unknown version)"
	}
	return s
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func culprits(v *Verdict) string {
	var all []string
	for _, c := range v.Culprits {
		s := c.Text
		if c.Reason != "" {
			s += " (" + c.Reason + ")"
		}
		all = append(all, s)
	}
	return strings.Join(all, ", ")
}

// timeline writes a line for each event, and what it rests on where that was asked for.
func (r *Report) timeline(w io.Writer) {
	for i := range r.Events {
		e := &r.Events[i]
		if e.Verdict == nil {
			fmt.Fprintf(w, "%9s  %s: %s\n", fmt.Sprintf("+%.1fs", e.Offset), e.Kind, e.Incident)
			continue
		}
		v := e.Verdict
		as := "as recorded"
		switch e.Recorded {
		case "same":
		case "nothing":
			as = "DIFFERS: nothing was recorded"
		default:
			as = "DIFFERS: recorded is " + e.Recorded
		}
		fmt.Fprintf(w, "%9s  %-7s  %-9s  %-21s  %s  [%s]\n", fmt.Sprintf("+%.1fs", e.Offset), e.Kind, v.Level, v.Class, culprits(v), as)
		if e.Evidence == nil {
			continue
		}
		onset := ""
		if v.Since != 0 {
			onset = fmt.Sprintf(", since about +%.1fs", v.Since)
		}
		fmt.Fprintf(w, "           seen best in %s #%d on %s%s; %s held up\n", v.Collective, v.Seq, orDash(v.Communicator), onset, plural(v.Victims, "rank is", "ranks are"))
		for _, why := range v.Why {
			fmt.Fprintf(w, "           - %s\n", why)
		}
		for _, wait := range v.Chain {
			fmt.Fprintf(w, "           > %s\n", wait)
		}
		if v.Counter != "" {
			fmt.Fprintf(w, "           - would change it: %s\n", v.Counter)
		}
		if v.Undetermined != "" {
			fmt.Fprintf(w, "           - cannot be told: %s\n", v.Undetermined)
		}
		e.Evidence.text(w)
	}
}

const indent = "             "

func (x *Excerpt) text(w io.Writer) {
	for i := range x.Ranks {
		r := &x.Ranks[i]
		fmt.Fprintf(w, "%srank %d (pid %d on %s): %s for %s, %.2f cores", indent, r.Rank, r.PID, orDash(r.Node), r.Process, seconds(r.For), r.CPU)
		for _, part := range []struct {
			say  bool
			text string
		}{
			{r.IO, "I/O"},
			{r.Starved > 0, fmt.Sprintf("ready without a CPU %.0f %% of the time", 100*r.Starved)},
			{r.Throttled > 0, fmt.Sprintf("held back by its CPU quota %.0f %%", 100*r.Throttled)},
			{r.MemoryPressure > 0, fmt.Sprintf("waiting for memory %.0f %%", 100*r.MemoryPressure)},
			{r.Step > 0, fmt.Sprintf("step %d", r.Step)}, {r.Mark != "", "in " + r.Mark}, {r.Exit != "", "ended by " + r.Exit}, {r.Xid != 0, fmt.Sprintf("Xid %d", r.Xid)},
			{r.Lost, "its agent is LOST"}, {r.Heard >= 0, "reported " + seconds(r.Heard) + " ago"},
		} {
			if part.say {
				fmt.Fprint(w, ", ", part.text)
			}
		}
		fmt.Fprintln(w)
		for _, in := range r.Inside {
			fmt.Fprintf(w, "%s  in %s\n", indent, in)
		}
		if len(r.Inside) == 0 && r.Last != "" {
			fmt.Fprintf(w, "%s  in no operation; the last was %s\n", indent, r.Last)
		}
		for k := range r.Calls {
			fmt.Fprintf(w, "%s  called %s\n", indent, r.Calls[k])
		}
	}
	if o := x.Operation; o != nil {
		fmt.Fprintf(w, "%s%s #%d on %s (%d members, id %s):\n", indent, o.Collective, o.Seq, orDash(o.Communicator), o.Size, o.ID)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, g := range o.Members {
			since := "last seen in an operation " + seconds(g.Age) + " ago"
			switch g.Are {
			case "inside":
				since = "the first for " + seconds(g.Age)
			case "finished", "gone from it":
				since = "the last " + seconds(g.Age) + " ago"
			case "not seen":
				since = "ranks of the communicator"
			}
			if g.Age < 0 && g.Are != "not seen" {
				since = ""
			}
			fmt.Fprintf(t, "%s  %s\t%d\t%s\t%s\n", indent, g.Are, len(g.Ranks), ranges(g.Ranks), since)
		}
		t.Flush()
	}
	if len(x.Connections) == 0 {
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "%sconnection\ton\tover\tposted, not taken\tlast completion\treceiver waits\tsender blocked\tlatency\tRTT\tslow windows\tcause\tlink\n", indent)
	for i := range x.Connections {
		c := &x.Connections[i]
		link := c.Link
		if c.Outages > 0 || c.Resent > 0 || c.Switches > 0 {
			link += fmt.Sprintf(" (%d outages, %d bytes sent again, %d switch-overs)", c.Outages, c.Resent, c.Switches)
		}
		fmt.Fprintf(t, "%s%d → %d\t%s\t%s\t%d\t%s\t%s\t%s\t%.2f ms\t%s\t%d of %d\t%s\t%s\n", indent, c.Src, c.Dst, orDash(c.Communicator), c.Transport, c.Outstanding,
			ago(c.LastCompletion), since(c.RxWaiting), since(c.TxBlocked), c.LatencyMs, rtt(c.RTTMs), c.SlowWindows, c.Windows, c.Cause, orDash(link))
	}
	t.Flush()
}

func rtt(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f ms", ms)
}

func ago(s float64) string {
	if s < 0 {
		return "never"
	}
	return seconds(s) + " ago"
}

func since(s float64) string {
	if s < 0 {
		return "no"
	}
	return seconds(s)
}

func orDash(s string) string {
	if s == "" {
		return "–"
	}
	return s
}

// maxRanges bounds what is written of a set of ranks.
const maxRanges = 16

// ranges writes ranks, which ascend, as 0-3, 7.
func ranges(ranks []int32) string {
	var parts []string
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		if len(parts) == maxRanges {
			return strings.Join(parts, ", ") + ", …"
		}
		if j == i {
			parts = append(parts, fmt.Sprint(ranks[i]))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", ranks[i], ranks[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ", ")
}
