package inspect

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// text prints reports for a reader in a hurry: first everybody in one line
// each, then those that need a look.
func (c *Cmd) text(out io.Writer, ps []*Process, single bool) error {
	w := bufio.NewWriter(out)
	full := ps
	if !single {
		overview(w, c.Path, ps)
		if !c.All && len(c.Rank) == 0 {
			full = nil
			for _, p := range ps {
				if p.trouble() {
					full = append(full, p)
				}
			}
			if len(full) == 0 && len(ps) > 0 {
				fmt.Fprintln(w, "\nNobody died or is stuck. --all shows everyone in full, --rank N one.")
			}
		}
	}
	for i, p := range full {
		if i > 0 || !single {
			fmt.Fprintln(w)
		}
		p.text(w)
	}
	return w.Flush()
}

func (p *Process) trouble() bool {
	if p.State == died || p.Kernel != "" {
		return true
	}
	for _, c := range p.Comms {
		if c.Stuck {
			return true
		}
	}
	return false
}

func overview(out io.Writer, path string, ps []*Process) {
	fmt.Fprintf(out, "%s in %s\n\n", count(uint64(len(ps)), "recorder"), path)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "JOB\tRANK\tNODE\tPID\tSTATE\tSTEP\tIN\tFOR\tWAITS FOR\tLAST SIGN OF LIFE")
	for _, p := range ps {
		in, age, waits, state, seen := "-", "-", "-", p.State, "now"
		if p.Mark != "" {
			in, age = p.Mark, ago(p.MarkAge)
		}
		var longest seconds
		for _, c := range p.Comms {
			if c.In != nil && c.In.Age >= longest {
				longest, in, age, waits = c.In.Age, c.Name+" "+c.In.title(), ago(c.In.Age), c.waitsFor()
			}
			if c.Stuck {
				state = "STUCK"
			}
		}
		switch {
		case p.State == died:
			state = "DIED"
		case p.Kernel != "":
			state = strings.ToUpper(p.Kernel)
		}
		if p.State != running {
			seen = p.At.Format(time.DateTime)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%s\t%d\t%s\t%s\t%s\t%s\n", p.Job, p.Rank, p.Node, p.PID, state, p.Step, in, age, waits, seen)
	}
	w.Flush()
}

// waitsFor names the ranks (of the job, where it is known) whose bytes are
// missing, or who do not take what was sent.
func (c *Comm) waitsFor() string {
	var ranks []string
	for i := range c.Links {
		l := &c.Links[i]
		if l.RxWaiting == 0 && l.TxBlocked == 0 {
			continue
		}
		if l.World != nil {
			ranks = append(ranks, fmt.Sprintf("rank %d", *l.World))
		} else {
			ranks = append(ranks, fmt.Sprintf("rank %d of %s", l.Peer, c.Name))
		}
	}
	return dash(strings.Join(ranks, ", "))
}

func (p *Process) text(w io.Writer) {
	fmt.Fprintf(w, "rank %d of %d of job %s (node %s, local rank %d, attempt %d)\n", p.Rank, p.WorldSize, p.Job, p.Node, p.LocalRank, p.Attempt)
	switch p.State {
	case running:
		state := "RUNNING"
		if p.Kernel != "" {
			state = "there but " + strings.ToUpper(p.Kernel)
		}
		fmt.Fprintf(w, "  process %d is %s; its recorder was made %s\n", p.PID, state, p.Created.Format(time.DateTime))
	case closed:
		fmt.Fprintf(w, "  process %d left in good order; last sign of life %s\n", p.PID, p.At.Format(time.DateTime))
	default:
		fmt.Fprintf(w, "  process %d DIED without closing its recorder; last sign of life %s. Ages are before that.\n", p.PID, p.At.Format(time.DateTime+".000"))
	}
	step := ""
	if p.Step > 0 {
		step = fmt.Sprintf("step %d, ", p.Step)
	}
	if p.Mark != "" {
		step += fmt.Sprintf("in %s for %s, ", p.Mark, ago(p.MarkAge))
	}
	fmt.Fprintf(w, "  %s%s appended, %d no longer readable, %d of them dropped\n", step, count(p.Appended, "record"), p.Unreadable, p.Dropped)
	if n := p.CommOverflow + p.ConnOverflow; n > 0 {
		fmt.Fprintf(w, "  INCOMPLETE: %d communicators and %d connections found no room in the recorder's tables\n", p.CommOverflow, p.ConnOverflow)
	}
	if p.Unstamped > 0 {
		fmt.Fprintf(w, "  INCOMPLETE: operations of %d communicators on a GPU found no room in the recorder's stamp table\n", p.Unstamped)
	}
	fmt.Fprintf(w, "  %s\n", p.Recorder)
	if len(p.Comms) == 0 {
		fmt.Fprintln(w, "\n  no communicator was ever made")
	}
	for _, c := range p.Comms {
		c.text(w, p.State)
	}
}

func (c *Comm) text(w io.Writer, state string) {
	fmt.Fprintf(w, "\n%s: rank %d of %d, %s, id %s\n", c.Name, c.Rank, c.Size, c.State, c.ID)
	queued := ""
	if n := c.Enqueued - min(c.Enqueued, max(c.Started, c.Finished)); n > 0 {
		queued = fmt.Sprintf(", %d more queued", n)
	}
	switch {
	case c.In != nil:
		verb := "in"
		switch {
		case c.Stuck && state == died:
			verb = "DIED IN"
		case c.Stuck:
			verb = "STUCK IN"
		}
		fmt.Fprintf(w, "  %s %s, for %s%s\n", verb, c.In.describe(), ago(c.In.Age), queued)
	case c.Finished > 0:
		fmt.Fprintf(w, "  idle: finished #%d %s ago%s\n", c.Finished, ago(c.FinishedAge), queued)
	default:
		fmt.Fprintf(w, "  nothing has run yet%s\n", queued)
	}
	if c.GPU != nil {
		fmt.Fprintf(w, "  stamped by GPU %d, %s (%s), times within %s\n", c.GPU.Ordinal, c.GPU.Name, c.GPU.UUID, ago(c.GPU.ClockErr))
	}
	fmt.Fprintf(w, "  last enqueued #%d, started #%d, finished #%d\n", c.Enqueued, c.Started, c.Finished)
	for i := range c.Links {
		l := &c.Links[i]
		fmt.Fprintf(w, "  %s, by %s:\n", l.peer(), l.Name)
		for _, line := range l.describe() {
			fmt.Fprintf(w, "    %s\n", line)
		}
	}
	if len(c.Last) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  SEQ\tOPERATION\tBYTES\tTYPE\tVIA\tAGO\tQUEUED\tWAIT\tTRANSFER\tTOOK\tRESULT")
	for i := range c.Last {
		o := &c.Last[i]
		fmt.Fprintf(t, "  #%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", o.Seq, o.kind(), size(o.Bytes), dash(strings.TrimSpace(o.DType+" "+o.RedOp)), dash(o.via()),
			ago(o.Age), ago(o.Queued), o.waited(), ago(o.Transfer), ago(o.Took), o.Result)
	}
	t.Flush()
}

func (o *Op) title() string { return fmt.Sprintf("%s #%d", o.Collective, o.Seq) }

// describe is an operation in words: "AllReduce #812 (64 MiB bfloat16 sum, ring/simple)".
func (o *Op) describe() string {
	parts := []string{strings.TrimSpace(size(o.Bytes) + " " + strings.TrimSpace(o.DType+" "+o.RedOp))}
	if o.Root != nil {
		parts = append(parts, o.partner())
	}
	if via := o.via(); via != "" {
		parts = append(parts, via)
	}
	return fmt.Sprintf("%s (%s)", o.title(), strings.Join(parts, ", "))
}

// via is how an operation ran: "direct/ll, 8 SMs, replay".
func (o *Op) via() string {
	via := o.Algo
	if o.Proto != "" && o.Proto != record.ProtoNone.String() {
		via += "/" + o.Proto
	}
	if o.SMs > 0 {
		via += fmt.Sprintf(", %d SMs", o.SMs)
	}
	if o.Replay {
		via += ", replay"
	}
	if o.OnHost {
		via += ", on the host"
	}
	return via
}

func (o *Op) partner() string {
	switch o.Collective {
	case "Send":
		return fmt.Sprintf("to %d", *o.Root)
	case "Recv":
		return fmt.Sprintf("from %d", *o.Root)
	}
	return fmt.Sprintf("root %d", *o.Root)
}

func (o *Op) kind() string {
	if o.Root != nil {
		return o.Collective + " " + o.partner()
	}
	return o.Collective
}

func (o *Op) waited() string {
	if o.WaitedFor != nil {
		return fmt.Sprintf("%s for %d", ago(o.Wait), *o.WaitedFor)
	}
	return ago(o.Wait)
}

func (l *Link) peer() string {
	if l.World != nil && *l.World != l.Peer {
		return fmt.Sprintf("rank %d (rank %d of the job)", l.Peer, *l.World)
	}
	return fmt.Sprintf("rank %d", l.Peer)
}

func (l *Link) describe() (says []string) {
	switch l.State {
	case record.LinkDown.String():
		says = append(says, fmt.Sprintf("DOWN for %s", ago(l.StateAge)))
	case record.LinkSwitched.String():
		says = append(says, fmt.Sprintf("carries what another path did for %s, %s sent again", ago(l.StateAge), size(l.Resent)))
	}
	if l.RxWaiting > 0 {
		s := fmt.Sprintf("WAITING for its bytes for %s", ago(l.RxWaiting))
		if l.ReceivedAge > 0 {
			s += fmt.Sprintf(", last received %s ago", ago(l.ReceivedAge))
		} else {
			s += ", never received any"
		}
		says = append(says, s)
	}
	if l.Outstanding > 0 {
		s := fmt.Sprintf("%s sent and not taken", size(l.Outstanding))
		if l.SentAge > 0 {
			s += fmt.Sprintf(", last sent %s ago", ago(l.SentAge))
		}
		if l.TakenAge > 0 {
			s += fmt.Sprintf(", last taken %s ago", ago(l.TakenAge))
		}
		says = append(says, s)
	}
	if l.TxBlocked > 0 {
		says = append(says, fmt.Sprintf("NO CREDIT from it for %s", ago(l.TxBlocked)))
	}
	if l.Cause != "" {
		says = append(says, "last window slow: "+l.Cause)
	}
	return says
}

func count(n uint64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// ago writes a length of time with three digits; "-" is none.
func ago(s seconds) string {
	d := time.Duration(float64(s) * 1e9)
	switch {
	case s == 0:
		return "-"
	case d < time.Millisecond:
		return fmt.Sprintf("%.3g µs", float64(d)/1e3)
	case d < time.Second:
		return fmt.Sprintf("%.3g ms", float64(d)/1e6)
	case d < time.Minute:
		return fmt.Sprintf("%.3g s", float64(d)/1e9)
	}
	return d.Round(time.Second).String()
}

func size(b uint64) string {
	f, unit := float64(b), 0
	for f >= 1024 && unit < 4 {
		f /= 1024
		unit++
	}
	return fmt.Sprintf("%.4g %s", f, [...]string{"B", "KiB", "MiB", "GiB", "TiB"}[unit])
}
