package remediatorcmd

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/remediation"
)

const (
	noteQueue  = 64
	noteTries  = 3
	noteWithin = 3 * time.Second
	noteAgain  = time.Second
)

// notes tells jobs' masters what was done about their incidents, for their status pages.
// Nothing waits for it: what finds no room, or no master, is counted and given up.
type notes struct {
	send    func(ctx context.Context, q *wire.NoteRequest) error
	log     *slog.Logger
	queue   chan remediation.Entry
	dropped prometheus.Counter
	again   time.Duration
}

func newNotes(m masters, reg prometheus.Registerer, log *slog.Logger) (*notes, error) {
	vec := prom.CounterVec(names.NotesDropped)
	if err := reg.Register(vec); err != nil {
		return nil, fmt.Errorf("remediator: %w", err)
	}
	return &notes{send: m.note, log: log, queue: make(chan remediation.Entry, noteQueue), dropped: vec.WithLabelValues(), again: noteAgain}, nil
}

// event is a remediation.Options.OnEvent.
func (n *notes) event(e remediation.Entry) {
	select {
	case n.queue <- e:
	default:
		n.dropped.Inc()
	}
}

// run tells until ctx ends.
func (n *notes) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-n.queue:
			if err := n.tell(ctx, &e); err != nil && ctx.Err() == nil {
				n.dropped.Inc()
				n.log.Debug("the master was not told what was done about its incident", "job", e.Alert.Job, "incident", e.Alert.Incident, "err", err)
			}
		}
	}
}

func (n *notes) tell(ctx context.Context, e *remediation.Entry) (err error) {
	q := &wire.NoteRequest{Job: e.Alert.Job, Incident: e.Alert.Incident, Notes: story(e)}
	for try := range noteTries {
		if try > 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(n.again):
			}
		}
		tctx, cancel := context.WithTimeout(ctx, noteWithin)
		err = n.send(tctx, q)
		cancel()
		if err == nil {
			return nil
		}
	}
	return err
}

// story is what is known of an entry by now. The master leaves out what it has.
func story(e *remediation.Entry) (list []*wire.NoteEntry) {
	add := func(at time.Time, kind, format string, args ...any) {
		if !at.IsZero() {
			list = append(list, &wire.NoteEntry{AtUnixNs: at.UnixNano(), Kind: kind, Text: fmt.Sprintf(format, args...)})
		}
	}
	add(e.Alert.StartsAt, collector.NoteAlert, "%s began to fire", e.Alert.Name)
	add(e.Received, collector.NoteWebhook, "the remediator has it as entry %d", e.Seq)
	add(e.Started, collector.NoteDecision, "%s, by policy %s", e.Kind, e.Policy)
	if e.State != remediation.Closed {
		return list
	}
	detail := ""
	if e.Detail != "" {
		detail = ": " + e.Detail
	}
	if e.Outcome == remediation.OutcomeDone {
		add(e.Finished, collector.NoteAction, "%s "+collector.Done+"%s", e.Kind, detail)
		add(e.Effective, collector.NoteRunning, "the job runs again")
		return list
	}
	if e.Outcome == remediation.OutcomeNone {
		add(e.Finished, collector.NoteAction, "none is taken%s", detail)
		return list
	}
	add(e.Finished, collector.NoteAction, "%s %s%s", e.Kind, e.Outcome, detail)
	return list
}

// note tells a job's master.
func (m masters) note(ctx context.Context, q *wire.NoteRequest) error {
	conn, address, err := m.dial(q.Job)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := wire.NewNotesClient(conn).Note(ctx, q); err != nil {
		return fmt.Errorf("master of job %s at %s: %w", q.Job, address, err)
	}
	return nil
}
