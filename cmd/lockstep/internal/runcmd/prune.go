package runcmd

import (
	"cmp"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// keepDead is how many dead processes of each rank keep their recorders: the
	// last attempt, for the post-mortem, and the one before it, since the last
	// may have died at once of what the first left behind.
	keepDead = 2
	// orphaned is the age at which what ranks make for a moment has lost its maker.
	orphaned = time.Hour
)

// passing is what such files are called, and of what type they are: recorders that are
// not finished, and what GPU ranks meet by.
var passing = map[string]os.FileMode{".new-": 0, ".gpu-mail-": 0, "symm-": os.ModeSocket}

func passes(e os.DirEntry) bool {
	for prefix, is := range passing {
		if strings.HasPrefix(e.Name(), prefix) && e.Type() == is {
			return true
		}
	}
	return false
}

// prune removes the flight recorders of a job's dead processes, save the latest
// of each rank, what was told of the ends of older attempts than these, and what ranks
// that died while they joined have left, so that restarts do not fill the memory that
// dir is in. What it cannot read or remove it leaves.
func prune(dir, job string, attempt int, log *slog.Logger) {
	pruneEnds(dir, job, attempt, log)
	paths, err := record.List(dir)
	if err != nil {
		log.Warn("cannot look for old flight recorders", "err", err)
		return
	}
	dead := map[int32][]recorder{}
	for _, path := range paths {
		r, err := record.Open(path)
		if err != nil {
			continue // another version's, or not a recorder
		}
		if h := r.Header(); h.Job == job {
			if _, alive := r.Process(); !alive {
				dead[h.Rank] = append(dead[h.Rank], recorder{path, h})
			}
		}
		r.Close()
	}
	for _, all := range dead {
		slices.SortFunc(all, func(a, b recorder) int { return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.path, b.path)) })
		kept := 0
		for i, r := range all {
			if i == 0 || !r.sameProcess(all[i-1]) { // one process may have several
				kept++
			}
			if kept > keepDead {
				remove(r.path, log)
			}
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Warn("cannot look for unfinished flight recorders", "err", err)
	}
	for _, e := range entries {
		if !passes(e) {
			continue
		}
		if fi, err := e.Info(); err == nil && time.Since(fi.ModTime()) > orphaned {
			remove(filepath.Join(dir, e.Name()), log)
		}
	}
}

// pruneEnds removes what was told of the ends of a job's attempts that are long past.
func pruneEnds(dir, job string, attempt int, log *slog.Logger) {
	paths, err := record.ListEnds(dir)
	if err != nil {
		log.Warn("cannot look for how former attempts ended", "err", err)
		return
	}
	for _, path := range paths {
		if e, err := record.ReadEnd(path); err == nil && e.Job == job && int64(e.Attempt)+keepDead < int64(attempt) {
			remove(path, log)
		}
	}
}

type recorder struct {
	path string
	record.Header
}

func (r recorder) sameProcess(o recorder) bool {
	return r.BootID == o.BootID && r.PID == o.PID && r.StartTime == o.StartTime
}

func remove(path string, log *slog.Logger) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Warn("cannot remove an old flight recorder", "err", err)
	}
}
