package diagnosis

import (
	"fmt"
	"slices"
	"strings"
)

// secondOpinion says beside a hang's evidence what NCCL's RAS knows of its communicator.
// RAS counts launches and hears who answers it: it can agree, or name another; that it
// finds nothing says little, since it has found nothing in jobs that hung.
func (v *view) secondOpinion(f *finding) {
	if !f.hang {
		return
	}
	for i := range v.ev.RAS {
		r := &v.ev.RAS[i]
		// An answer of before the onset is about something else.
		if r.Comm != f.Comm || r.At < f.Since || v.ev.Now-r.At > RASKeep {
			continue
		}
		if s := v.opinion(f, r); s != "" {
			if len(f.Why) == maxWhy { // the last of the others says less
				f.Why = f.Why[:maxWhy-1]
			}
			f.why("%s", s)
		}
		return
	}
}

func (v *view) opinion(f *finding, r *RAS) string {
	var members []Member
	for i := range v.ev.Comms {
		if v.ev.Comms[i].ID == r.Comm {
			members = v.ev.Comms[i].Members
		}
	}
	world := func(rank int32) int32 {
		if int(rank) < len(members) {
			return members[rank].World
		}
		return -1
	}
	blames := func(rank int32) bool {
		w := world(rank)
		return w >= 0 && slices.ContainsFunc(f.Culprits, func(c Culprit) bool { return c.Kind == CulpritRank && c.Rank == w })
	}
	var missing, behind []string
	agrees := false
	for _, m := range r.Missing {
		s := v.rasRank(m.Rank, world(m.Rank))
		if m.Dead {
			s += " (given up)"
		}
		missing, agrees = append(missing, s), agrees || blames(m.Rank)
	}
	for _, b := range r.Behind {
		what := b.Coll
		if what == "" {
			what = "operations"
		}
		behind = append(behind, fmt.Sprintf("%s has launched %d %s of %d", v.rasRank(b.Rank, world(b.Rank)), b.Launched, what, b.Most))
		agrees = agrees || blames(b.Rank)
	}
	var parts []string
	if len(missing) > 0 {
		parts = append(parts, "missing: "+list(missing, r.More))
	}
	if len(behind) > 0 {
		parts = append(parts, "behind: "+list(behind, r.More))
	}
	said := strings.Join(parts, "; ")
	switch {
	case said == "":
		return fmt.Sprintf("NCCL's RAS misses no rank of %s, and all have launched alike", f.CommName)
	case agrees:
		return "NCCL's RAS agrees: " + said
	}
	return "NCCL's RAS says otherwise: " + said
}

func (v *view) rasRank(rank, world int32) string {
	if world < 0 {
		return fmt.Sprintf("the communicator's rank %d", rank)
	}
	return fmt.Sprintf("rank %d", world)
}

// list is the first few, and that there are more.
func list(s []string, more bool) string {
	const most = 4
	if len(s) > most {
		s, more = s[:most], true
	}
	out := strings.Join(s, ", ")
	if more {
		out += ", and more"
	}
	return out
}
