package service

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
	"github.com/lockstep-ccl/lockstep/pathplan"
)

// A planner's state on disk is its plan (leases, lanes' paths, bad links), so that one that
// is started again gives each connection the path that it has. The file:
//
//	0 stateMagic, whose last byte is the version   8 length of the plan   16 its SHA-256   48 the plan
//
// The plan is pathplan's snapshot, with a version of its own. It is replaced as a whole, so
// that a crash leaves the old one or the new one.
const (
	stateMagic  = "LKSPLAN1"
	stateHeader = len(stateMagic) + 8 + sha256.Size
	stateFile   = "planner.state"
	maxState    = 1 << 30
	// saveEvery is how old the state on disk gets; a lease is renewed as often.
	saveEvery = 5 * time.Second
	// restoredFor is how long processes have to find a planner that has started again.
	restoredFor = time.Minute
)

var errState = errors.New("not a planner's state")

func encodeState(plan []byte) []byte {
	b := append(make([]byte, 0, stateHeader+len(plan)), stateMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(plan)))
	sum := sha256.Sum256(plan)
	return append(append(b, sum[:]...), plan...)
}

func decodeState(b []byte) (plan []byte, err error) {
	n := len(stateMagic)
	switch {
	case len(b) < stateHeader || string(b[:n-1]) != stateMagic[:n-1]:
		return nil, errState
	case b[n-1] != stateMagic[n-1]:
		return nil, fmt.Errorf("%w that this version reads: it is version %q, want %q", errState, b[n-1], stateMagic[n-1])
	}
	plan = b[stateHeader:]
	if sum := sha256.Sum256(plan); binary.LittleEndian.Uint64(b[n:]) != uint64(len(plan)) || !bytes.Equal(sum[:], b[n+8:stateHeader]) {
		return nil, fmt.Errorf("%w: its checksum does not match", errState)
	}
	return plan, nil
}

// restore takes over the plan on disk, if there is one. One that cannot be read is left:
// whoever has a connection says so again.
func (s *Server) restore(path string) (err error) {
	if s.state, err = statedir.OpenPrivate(path); err != nil {
		return fmt.Errorf("planner: state: %w", err)
	}
	b, err := s.state.ReadFile(stateFile, maxState)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	dropped := 0
	if err == nil {
		var plan []byte
		if plan, err = decodeState(b); err == nil {
			dropped, err = s.planner.Restore(time.Now(), plan)
		}
	}
	if errors.Is(err, statedir.ErrForeign) {
		return errors.Join(fmt.Errorf("planner: state: %w", err), s.state.Close())
	}
	if err != nil {
		s.o.Log.Warn("the planner begins without its state; connections will be asked for again", "file", s.state.Join(stateFile), "err", err)
		return nil
	}
	for _, id := range s.planner.Conns() {
		s.orphans[id] = time.Now().Add(restoredFor) // until its process asks
	}
	s.probing.remember(time.Now(), s.planner.Links())
	s.o.Log.Info("the planner goes on with its state", "jobs", s.planner.Jobs(), "dropped", dropped)
	return nil
}

// remember takes over which links were bad, so that they are looked at again.
func (p *prober) remember(now time.Time, links []pathplan.LinkView) {
	for _, l := range links {
		if l.State != (pathplan.LinkState{}) {
			p.bad[l.Link] = &badLink{state: l.State, since: now, last: now}
			p.found[l.Link]++
		}
	}
}

// keep saves the plan until ctx ends, and then once more.
func (s *Server) keep(ctx context.Context) {
	t := time.NewTicker(saveEvery)
	defer t.Stop()
	for ended := false; !ended; {
		select {
		case <-ctx.Done():
			ended = true
		case <-t.C:
		}
		s.save()
	}
}

func (s *Server) save() {
	s.mu.Lock()
	plan := s.planner.Snapshot()
	s.mu.Unlock()
	failed := ""
	if err := s.state.Replace(stateFile, encodeState(plan)); err != nil {
		failed = err.Error()
	}
	if old := s.stateError.Swap(&failed); failed != "" && (old == nil || *old == "") {
		s.o.Log.Warn("the plan cannot be saved: a planner that starts again will begin anew", "err", failed)
	}
}

// StateError says why the plan could not be saved when it last was, "" when it could.
func (s *Server) StateError() string {
	if e := s.stateError.Load(); e != nil {
		return *e
	}
	return ""
}
