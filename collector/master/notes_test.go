package master

import (
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
)

func TestNotesAreKeptOnce(t *testing.T) {
	in := incidents{job: "job"}
	in.open = []*openIncident{{Incident: collector.Incident{ID: "a"}}}
	in.closed = []collector.Incident{{ID: "b"}}
	q := &wire.NoteRequest{Notes: []*wire.NoteEntry{
		{Kind: collector.NoteWebhook, AtUnixNs: 5, Text: "entry 1"},
		{Kind: collector.NoteAction, AtUnixNs: 6, Text: strings.Repeat("é", maxNoteText)},
		{Kind: "rumour", AtUnixNs: 6, Text: "left out"},
		{Kind: collector.NoteAction, AtUnixNs: -1},
		nil,
	}}
	for _, id := range []string{"a", "b"} {
		if kept, ok := in.note(id, notesOf(q), t0); kept != 2 || !ok {
			t.Errorf("%s: %d kept, %v", id, kept, ok)
		}
		if kept, _ := in.note(id, notesOf(q), t0); kept != 0 {
			t.Errorf("%s: %d kept again", id, kept)
		}
	}
	if n := in.open[0].Notes[1]; len(n.Text) > maxNoteText+len("…") || !n.At.Equal(time.Unix(0, 6)) {
		t.Errorf("note %+v", n)
	}
	if _, ok := in.note("c", notesOf(q), t0); ok {
		t.Error("a note of an incident that nobody has")
	}
	for i := range int64(100) {
		in.note("a", notesOf(&wire.NoteRequest{Notes: []*wire.NoteEntry{{Kind: collector.NoteAlert, AtUnixNs: 100 + i}}}), t0)
	}
	if n := len(in.open[0].Notes); n != collector.MaxNotes {
		t.Errorf("%d notes", n)
	}
}
