package master

import (
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// noteService keeps the gRPC method out of Master's own surface.
type noteService struct {
	wire.UnimplementedNotesServer
	*Master
}

const maxNoteText = 160 // bytes

// Note takes in what a remediator did about an incident, to be shown. While a restart is under
// way the incident also keeps its name: the ranks that it ends did not break step.
func (m noteService) Note(ctx context.Context, q *wire.NoteRequest) (*wire.NoteReply, error) {
	if err := m.admit(ctx, wire.Identity.Remediator); err != nil {
		return nil, err
	}
	if q.Job != m.o.Job {
		return nil, status.Errorf(codes.FailedPrecondition, "this is the master of another job than %.*q", wire.MaxName, q.Job)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	kept, ok := m.incidents.note(q.Incident, notesOf(q), time.Unix(0, m.now()))
	if !ok {
		return nil, status.Errorf(codes.NotFound, "job %s has no incident %.256q", m.o.Job, q.Incident)
	}
	if kept > 0 {
		m.saveSoon()
	}
	return &wire.NoteReply{Kept: uint32(kept)}, nil
}

// notesOf are the notes that make sense.
func notesOf(q *wire.NoteRequest) (notes []collector.Note) {
	for _, n := range q.Notes[:min(len(q.Notes), collector.MaxNotes)] {
		if n == nil || n.AtUnixNs <= 0 || !slices.Contains(collector.NoteKinds, n.Kind) {
			continue
		}
		text := n.Text
		if len(text) > maxNoteText {
			text = strings.ToValidUTF8(text[:maxNoteText], "") + "…"
		}
		notes = append(notes, collector.Note{At: time.Unix(0, n.AtUnixNs), Kind: n.Kind, Text: text})
	}
	return notes
}

// note adds notes to an incident, open or closed. Notes that it has already are left out: a
// remediator that was killed reports again.
func (t *incidents) note(id string, notes []collector.Note, now time.Time) (kept int, ok bool) {
	var in *collector.Incident
	var open *openIncident
	for _, i := range t.open {
		if i.ID == id {
			in, open = &i.Incident, i
		}
	}
	for i := range t.closed {
		if t.closed[i].ID == id {
			in = &t.closed[i]
		}
	}
	if in == nil {
		return 0, false
	}
	// A snapshot may hold the former slice.
	list := slices.Clone(in.Notes)
	for _, n := range notes {
		same := func(o collector.Note) bool { return o.Kind == n.Kind && o.At.Equal(n.At) && o.Text == n.Text }
		if len(list) < collector.MaxNotes && !slices.ContainsFunc(list, same) {
			list = append(list, n)
			kept++
		}
	}
	in.Notes = list
	if open != nil && kept > 0 {
		switch was := !open.stopping.IsZero(); {
		case !collector.Restarting(list):
			open.stopping = time.Time{}
		case !was:
			open.stopping = now
		}
	}
	return kept, true
}
