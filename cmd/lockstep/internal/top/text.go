package top

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// paper is what is written on: the zero value is a plain text of any size.
type paper struct {
	color         bool
	width, height int
}

const maxEvidence = 4 // lines of an incident

// print writes the jobs.
func (c *Cmd) print(out io.Writer, views []View, p paper) error {
	for i := range views {
		v := &views[i]
		if i > 0 {
			fmt.Fprintln(out)
		}
		health := v.Health
		if health == "" {
			health = "no master asked"
		}
		if v.Stale {
			health += ", stale"
		}
		fmt.Fprintf(out, "%s  step %d  attempt %d  %d ranks  %s  %s\n", p.bold(clean(v.Job)), v.Step, v.Attempt, v.WorldSize, p.tone(v.Health, health), v.At.Format("15:04:05"))
		for k := range v.Open {
			in := &v.Open[k]
			var names []string
			for _, k := range in.Culprits {
				name := k.Name
				if k.Node != "" {
					name += " on " + k.Node
				}
				if k.Reason != "" {
					name += " (" + k.Reason + ")"
				}
				names = append(names, name)
			}
			fmt.Fprintf(out, "%s %s: %s, for %s\n", p.tone(in.Level, in.Level), clean(in.Class), clean(strings.Join(names, ", ")), span(v.At.Sub(in.Since).Seconds()))
			for _, e := range in.Evidence[:min(len(in.Evidence), maxEvidence)] {
				fmt.Fprintf(out, "  %s\n", clean(e))
			}
		}
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		if c.Ranks {
			each(w, v)
		} else {
			folded(w, v)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// each writes a line for each rank.
func each(w io.Writer, v *View) {
	fmt.Fprintln(w, "RANK\tNODE\tPID\tSTATE\tFOR\tIN\tWAITS FOR")
	for i := range v.Ranks {
		r := &v.Ranks[i]
		in := ""
		if r.Collective != "" {
			in = fmt.Sprintf("%s #%d on %s (its rank %d)", r.Collective, r.Sequence, r.Communicator, r.CommRank)
		} else if r.Mark != "" {
			in = "its own " + r.Mark
		} else {
			in = r.WaitsIn
		}
		held := ""
		if r.State != web.StandingMoving {
			held = span(r.Seconds)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Rank, clean(r.Node), number(int64(r.PID)), state(r.State, r.Culprit), held, clean(in), clean(r.Whom()))
	}
}

// folded writes a line for ranks that stand alike.
func folded(w io.Writer, v *View) {
	list, more := web.Fold(v.Ranks)
	fmt.Fprintln(w, "STATE\tN\tRANKS\tFOR\tIN\tWAITS FOR")
	for i := range list {
		s := &list[i]
		held := ""
		if s.Seconds > 0 {
			held = span(s.Seconds)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\n", state(s.State, s.Culprit), s.Ranks, clean(s.Who), held, clean(s.Where), clean(s.WaitsFor))
	}
	if more > 0 {
		fmt.Fprintf(w, "and %d other situations: --ranks shows all\n", more)
	}
}

func state(s string, culprit bool) string {
	s = strings.ReplaceAll(clean(s), "_", " ")
	if culprit {
		s += " (blamed)"
	}
	return s
}

func number(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

func span(s float64) string {
	d := time.Duration(max(s, 0) * 1e9)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
}

// clean makes what jobs call themselves safe for a terminal: no control characters, no
// direction marks.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '·'
		}
		return r
	}, s)
}

func (p paper) bold(s string) string { return p.paint("1", s) }

func (p paper) tone(level, s string) string {
	switch level {
	case "confirmed":
		return p.paint("1;31", s)
	case "suspected", "unknown":
		return p.paint("33", s)
	case "healthy":
		return p.paint("32", s)
	}
	return s
}

func (p paper) paint(code, s string) string {
	if !p.color {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

// screen collects one frame and cuts it to the terminal's size.
type screen struct {
	paper
	text strings.Builder
}

func (s *screen) Write(b []byte) (int, error) { return s.text.Write(b) }

func (s *screen) line(format string, args ...any) { fmt.Fprintf(&s.text, format+"\n", args...) }

// frame is what draws it: each line over the former one, so that nothing flickers.
func (s *screen) frame() string {
	var b strings.Builder
	b.WriteString("\x1b[H")
	lines := strings.Split(strings.TrimSuffix(s.text.String(), "\n"), "\n")
	for i, l := range lines {
		if i == s.height-1 && len(lines) > s.height {
			l = fmt.Sprintf("… %d more lines", len(lines)-i)
		}
		if i >= s.height {
			break
		}
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(cut(l, s.width))
		b.WriteString("\x1b[0m\x1b[K")
	}
	b.WriteString("\x1b[J")
	return b.String()
}

// cut keeps what fits into width columns; escape sequences take none.
func cut(l string, width int) string {
	var b strings.Builder
	n, escape := 0, false
	for _, r := range l {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = !(r >= '@' && r <= '~' && r != '[')
		default:
			if n++; n > width {
				continue
			}
		}
		b.WriteRune(r)
	}
	return b.String()
}
