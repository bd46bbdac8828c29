// Package replaytest makes recordings for tests.
package replaytest

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// Retell returns a recording of the same evidence as file's, with the verdicts of this
// build's engine: a replay of it differs in nothing, whatever build has recorded file.
func Retell(file []byte) ([]byte, error) {
	r, err := replay.NewReader(bytes.NewReader(file), replay.Limits{})
	if err != nil {
		return nil, fmt.Errorf("open the recording: %w", err)
	}
	var (
		out          bytes.Buffer
		w            *replay.Writer
		engine       *diagnosis.Engine
		run, segment uint64
	)
	for {
		p, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out.Bytes(), nil
		}
		if err != nil {
			return nil, fmt.Errorf("read the recording: %w", err)
		}
		if engine == nil || p.Header.Run != run {
			engine = diagnosis.New(p.Header.Config)
		}
		switch {
		case w == nil:
			w, err = replay.NewWriter(&out, *p.Header)
		case p.Header.Run != run || p.Header.Segment != segment:
			err = w.Segment(&out, *p.Header)
		}
		if err != nil {
			return nil, fmt.Errorf("begin a segment anew: %w", err)
		}
		run, segment = p.Header.Run, p.Header.Segment
		for _, m := range p.Marks {
			err = errors.Join(err, w.Mark(m))
		}
		if err = errors.Join(err, w.Write(p.Number, p.Evidence, engine.Diagnose(p.Evidence))); err != nil {
			return nil, fmt.Errorf("record pass %d anew: %w", p.Number, err)
		}
	}
}
