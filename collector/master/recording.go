package master

import (
	"context"
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// Recording says what of its evidence a master with a state directory keeps, to be judged
// again offline. Zero fields take diagnosis/replay's defaults.
type Recording struct {
	Off           bool
	Program       string // version of this program, for whoever reads it
	MaxBytes      int64
	MaxAge        time.Duration
	Incidents     int
	IncidentBytes int64
}

// startRecording makes the recorder, when there is to be one.
func (m *Master) startRecording() (err error) {
	o := m.o.Recording
	if o.Off || m.o.StateDir == "" {
		return nil
	}
	var open []string
	for _, i := range m.incidents.open {
		open = append(open, i.ID)
	}
	m.recorder, err = replay.NewRecorder(replay.RecorderOptions{
		Dir: m.o.StateDir, Job: m.o.Job, Program: o.Program, Interval: m.o.Interval, Config: m.o.Diagnosis,
		MaxBytes: o.MaxBytes, MaxAge: o.MaxAge, Incidents: o.Incidents, IncidentBytes: o.IncidentBytes,
		After: m.o.CloseAfter + 5*time.Second, Open: open, Log: m.log,
	})
	if err != nil {
		return fmt.Errorf("%w; no evidence is recorded when recording is off", err)
	}
	return nil
}

// runRecorder writes what is recorded until stop is called. stop waits for its end, but not for
// a disk that hangs.
func (m *Master) runRecorder() (stop func()) {
	if m.recorder == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.recorder.Run(ctx)
	}()
	return func() {
		cancel()
		select {
		case <-done:
		case <-time.After(saveWithin):
			m.log.Error("the end of the recording of evidence is missing: the disk does not answer", "dir", m.o.StateDir)
		}
	}
}

var markKinds = [...]replay.MarkKind{opened: replay.MarkOpened, confirmed: replay.MarkConfirmed, closed: replay.MarkClosed}

// marks tells the recorder what became of incidents.
func marks(events []event) (out []replay.Mark) {
	for _, e := range events {
		at := e.Opened
		switch e.change {
		case confirmed:
			at = e.Confirmed
		case closed:
			at = e.Closed
		}
		out = append(out, replay.Mark{Kind: markKinds[e.change], At: at.UnixNano(), Incident: e.ID, Key: e.Verdict.Key, Onset: e.Verdict.Since})
	}
	return out
}

// recording is what the snapshot tells of it, nil when there is none.
func (m *Master) recording() *collector.RecordingStatus {
	if m.recorder == nil {
		return nil
	}
	s := m.recorder.Stats()
	r := &collector.RecordingStatus{Passes: s.Passes, Bytes: s.Bytes, Size: s.Size, Skipped: make(map[string]uint64, len(s.Skipped))}
	if s.Oldest != 0 {
		r.Oldest = time.Unix(0, s.Oldest)
	}
	for _, why := range replay.Skips() {
		r.Skipped[why.String()] = s.Skipped[why]
	}
	return r
}
