package doctor

import (
	"fmt"
	"io"
	"strings"
)

// Status is what a check came to.
type Status string

// A lack costs an option, which is what Without says; what is broken keeps Lockstep, or
// what --require names, from working.
const (
	OK     Status = "ok"
	Lacks  Status = "lacks"
	Broken Status = "broken"
)

// Finding is what one check says. The JSON form is for scripts: fields are only added.
type Finding struct {
	Name    string `json:"name"`
	About   string `json:"about"`
	Status  Status `json:"status"`
	Found   string `json:"found"`
	Without string `json:"without,omitempty"`
	Do      string `json:"do,omitempty"`
}

// Report is all of them.
type Report struct {
	Node    string    `json:"node"`
	Version string    `json:"version"`
	OK      bool      `json:"ok"`
	Checks  []Finding `json:"checks"`
}

func (r *Report) add(ch check, f Finding, required bool) {
	f.Name, f.About = ch.name, ch.about
	if required && f.Status == Lacks {
		f.Status = Broken
	}
	if f.Status == OK {
		f.Without, f.Do = "", ""
	}
	r.Checks = append(r.Checks, f)
	r.OK = true
	for _, c := range r.Checks {
		r.OK = r.OK && c.Status != Broken
	}
}

func (r *Report) text(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "node %s, lockstep %s\n\n", r.Node, r.Version)
	count := map[Status]int{}
	for _, f := range r.Checks {
		count[f.Status]++
		mark := map[Status]string{OK: "✓", Lacks: "·", Broken: "✗"}[f.Status]
		fmt.Fprintf(&b, "%s %-8s %s\n", mark, f.Name, f.Found)
		if f.Without != "" {
			fmt.Fprintf(&b, "           without: %s\n", f.Without)
		}
		if f.Do != "" {
			fmt.Fprintf(&b, "           do:      %s\n", f.Do)
		}
	}
	verdict := "Lockstep works here"
	if !r.OK {
		verdict = "something that is needed is not there (✗)"
	}
	fmt.Fprintf(&b, "\n%s: %d ok, %d lacking, %d broken\n", verdict, count[OK], count[Lacks], count[Broken])
	_, err := io.WriteString(out, b.String())
	return err
}
