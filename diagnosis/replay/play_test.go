package replay_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// faults are simulated jobs in which an engine finds something.
var faults = map[string]diagnosistest.Config{
	"hang":      {Seed: 1, Faults: []diagnosistest.Fault{{Kind: diagnosistest.Hang, At: 12 * time.Second, Rank: 3}}},
	"kill":      {Seed: 2, Survivors: diagnosistest.Exit, Faults: []diagnosistest.Fault{{Kind: diagnosistest.Kill, At: 12 * time.Second, Rank: 5}}},
	"stall":     {Seed: 3, Faults: []diagnosistest.Fault{{Kind: diagnosistest.StallConn, At: 12 * time.Second, Rank: 0, Peer: 4}}},
	"straggler": {Seed: 4, Faults: []diagnosistest.Fault{{Kind: diagnosistest.SlowRank, At: 12 * time.Second, Until: 25 * time.Second, Rank: 2, Factor: 4}}},
	"healthy":   {Seed: 5},
}

// simulate runs a job for 30 s; each gets every pass.
func simulate(cfg diagnosistest.Config, each func(number uint64, ev *diagnosis.Evidence, told []diagnosis.Verdict)) {
	job, engine := diagnosistest.New(cfg), diagnosis.New(diagnosis.Config{})
	for n := uint64(1); job.Now() < 30*time.Second; n++ {
		job.Advance(100 * time.Millisecond)
		ev := job.Evidence()
		each(n, ev, engine.Diagnose(ev))
	}
}

func header(segment uint64) replay.Header {
	return replay.Header{Job: "job", Run: 1, Segment: segment, Started: time.Unix(0, diagnosistest.Start)}
}

func play(t *testing.T, file []byte, o replay.PlayOptions) *replay.Result {
	t.Helper()
	r, err := replay.NewReader(bytes.NewReader(file), replay.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	res, err := replay.Play(t.Context(), r, o)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// TestPlay: a replay of a whole recording says at every pass what was said.
func TestPlay(t *testing.T) {
	for name, cfg := range faults {
		t.Run(name, func(t *testing.T) {
			var file bytes.Buffer
			var late bytes.Buffer // begins six seconds later, as when segments are gone
			w, err := replay.NewWriter(&file, header(1))
			if err != nil {
				t.Fatal(err)
			}
			found := false
			simulate(cfg, func(n uint64, ev *diagnosis.Evidence, told []diagnosis.Verdict) {
				to := &file
				if n >= 60 {
					to = &late
				}
				if n == 60 {
					if err := w.Segment(to, header(2)); err != nil {
						t.Fatal(err)
					}
				}
				if err := w.Write(n, ev, told); err != nil {
					t.Fatal(err)
				}
				found = found || len(told) > 0
			})
			whole := append(slices.Clone(file.Bytes()), late.Bytes()...)
			events := 0
			res := play(t, whole, replay.PlayOptions{On: func(e *replay.Event, ev *diagnosis.Evidence) {
				if events++; !e.Same() || ev.Now != e.At {
					t.Errorf("%s of %q at %d is not what was told", e.Kind, e.Verdict.Key, e.At)
				}
			}})
			if !res.Identical || !res.Same() || res.Passes != 300 || res.Missing != 0 || res.Runs != 1 || res.History != 0 || res.Damage.Places != 0 {
				t.Errorf("of the whole: %+v", res)
			}
			if healthy := name == "healthy"; found == healthy || events == 0 != healthy || len(res.Recorded) == 0 != healthy {
				t.Errorf("%d events, %d episodes", events, len(res.Recorded))
			}
			t.Logf("%d ranks: %d bytes a pass", 8, len(whole)/300)

			// A recorder that is paced leaves passes out, though none at which verdicts change.
			var sparse bytes.Buffer
			if w, err = replay.NewWriter(&sparse, header(1)); err != nil {
				t.Fatal(err)
			}
			var before []string
			simulate(cfg, func(n uint64, ev *diagnosis.Evidence, told []diagnosis.Verdict) {
				var now []string
				for i := range told {
					now = append(now, told[i].Key+told[i].Level.String())
				}
				if n%5 == 0 || !slices.Equal(now, before) {
					if err := w.Write(n, ev, told); err != nil {
						t.Fatal(err)
					}
				}
				before = now
			})
			res = play(t, sparse.Bytes(), replay.PlayOptions{})
			if !res.Same() || res.Missing < 200 || res.Longest < 400*time.Millisecond {
				t.Errorf("of one pass in five: %+v", res)
			}

			res = play(t, late.Bytes(), replay.PlayOptions{})
			if !res.Same() || res.History < 5*time.Second {
				t.Errorf("of its end: history of %v missing, differences %+v", res.History, res.Differences)
			}
		})
	}
}

// TestPlayDiffers: a replay with other thresholds, or of other verdicts, is told to differ.
func TestPlayDiffers(t *testing.T) {
	var file, lied bytes.Buffer
	w, err := replay.NewWriter(&file, header(1))
	if err != nil {
		t.Fatal(err)
	}
	l, err := replay.NewWriter(&lied, header(1))
	if err != nil {
		t.Fatal(err)
	}
	var first int64
	simulate(faults["hang"], func(n uint64, ev *diagnosis.Evidence, told []diagnosis.Verdict) {
		if err := w.Write(n, ev, told); err != nil {
			t.Fatal(err)
		}
		for i := range told {
			if first == 0 {
				first = ev.Now
			}
			told[i].Culprits = slices.Clone(told[i].Culprits)
			told[i].Culprits[0].Rank++
		}
		if err := l.Write(n, ev, told); err != nil {
			t.Fatal(err)
		}
	})
	res := play(t, file.Bytes(), replay.PlayOptions{Config: func(c *diagnosis.Config) {
		c.SuspectAfter, c.ConfirmAfter, c.MaxSuspectAfter = time.Hour, time.Hour, time.Hour
	}})
	if res.Same() || res.Identical || len(res.Differences) != 1 || res.Differences[0].Recorded == nil || res.Differences[0].Replayed != nil {
		t.Errorf("an engine that is never sure: %+v", res.Differences)
	}
	res = play(t, lied.Bytes(), replay.PlayOptions{})
	if res.Same() || len(res.Differences) == 0 || res.Differences[0].What == "" {
		t.Errorf("another culprit: %+v", res.Differences)
	}
	// Before the fault both say nothing.
	res = play(t, lied.Bytes(), replay.PlayOptions{To: first - 1})
	if !res.Same() || res.Last >= first {
		t.Errorf("before the fault: %+v", res.Differences)
	}
	res = play(t, file.Bytes(), replay.PlayOptions{From: first + 1e9})
	if !res.Same() || len(res.Recorded) != 1 || !res.Recorded[0].Before {
		t.Errorf("from within the fault: %+v", res.Recorded)
	}
}

// TestPlayRuns: an engine that began anew is replayed by one that begins anew.
func TestPlayRuns(t *testing.T) {
	var file bytes.Buffer
	for run := range uint64(2) {
		h := header(1)
		h.Run = run
		w, err := replay.NewWriter(&file, h)
		if err != nil {
			t.Fatal(err)
		}
		simulate(faults["hang"], func(n uint64, ev *diagnosis.Evidence, told []diagnosis.Verdict) {
			if err := w.Write(n, ev, told); err != nil {
				t.Fatal(err)
			}
		})
	}
	if res := play(t, file.Bytes(), replay.PlayOptions{}); !res.Identical || res.Runs != 2 || res.Passes != 600 {
		t.Errorf("%+v", res)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, err := replay.NewReader(bytes.NewReader(file.Bytes()), replay.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := replay.Play(ctx, r, replay.PlayOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after a cancel: %v", err)
	}
	if _, err := replay.NewReader(bytes.NewReader([]byte("{}")), replay.Limits{}); !errors.Is(err, replay.ErrNoRecording) {
		t.Errorf("of something else: %v", err)
	}
	if _, err := replay.NewReader(bytes.NewReader(nil), replay.Limits{}); !errors.Is(err, replay.ErrNoRecording) || errors.Is(err, io.EOF) {
		t.Errorf("of nothing: %v", err)
	}
}
