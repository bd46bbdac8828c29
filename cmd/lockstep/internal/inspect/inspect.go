// Package inspect is `lockstep inspect`: what a dead or live process was in
// when it stopped, from its flight recorder alone.
//
// In flow recorder files, read as any reader does: without the processes'
// taking part, and without trust in their contents. Out flow a table of all
// processes and, for those that died or hang (or all), each communicator's
// last operations, as text or JSON. It judges nothing across processes: that
// is what the master does.
package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
	"github.com/lockstep-ccl/lockstep/record"
)

// Cmd is the command line.
type Cmd struct {
	Path    string        `arg:"" optional:"" default:"${runtime_dir}" type:"path" help:"A recorder file (*.rec), or a directory of them and its direct subdirectories (default: ${runtime_dir})."`
	Last    int           `short:"n" default:"10" placeholder:"N" help:"Operations to show of each communicator (default: 10)."`
	All     bool          `short:"a" help:"Of a directory, show every process in full, not only those that died or are stuck."`
	Rank    []int32       `short:"r" placeholder:"RANK" help:"Show only these ranks of the job, in full. Repeatable."`
	Stuck   time.Duration `default:"1s" help:"Call a running process stuck in an operation after so long."`
	Windows bool          `help:"Show every connection: its identity (queue pair, ports), and the last windows and changes of its path that are in the recorder, to the microsecond."`
	JSON    bool          `name:"json" help:"Write JSON: an array of processes, all in full."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Reads flight recorders, which outlive their processes, without disturbing those that live.
Ages are counted to now for a running process, and to its last sign of life for a dead one.

Examples:
  lockstep inspect                                        all ranks of this node at a glance
  lockstep inspect /dev/shm/lockstep/llm.5.4711.rec       one process in full
  lockstep inspect --rank 5 -n 50                         its last 50 operations on each communicator
  lockstep inspect --windows --rank 5 -n 100              what its connections' monitors recorded
  lockstep inspect --json | jq '.[] | select(.state == "died")'

Exit status: 0 when every recorder could be read, 1 otherwise.`
}

// Run prints what the recorders under c.Path say. Files that cannot be read
// are named in the error; the others are printed all the same.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	paths, single, err := find(c.Path)
	if err != nil {
		return fmt.Errorf("inspect: %w", err)
	}
	var all, ps []*process
	var bad []error
	reading := progress.Start("reading recorders")
	defer reading.Stop()
	for i, path := range paths {
		reading.Set("reading recorder %d of %d", i+1, len(paths))
		if err := ctx.Err(); err != nil {
			return err
		}
		p, err := load(path)
		switch {
		case errors.Is(err, os.ErrNotExist) && !single: // removed since it was listed
		case err != nil:
			bad = append(bad, err)
		default:
			all = append(all, p)
			if c.wants(p) {
				ps = append(ps, p)
			}
		}
	}
	sort.SliceStable(ps, func(i, j int) bool {
		a, b := ps[i].header, ps[j].header
		if a.Job != b.Job {
			return a.Job < b.Job
		}
		return a.Rank < b.Rank || a.Rank == b.Rank && a.Created.Before(b.Created)
	})
	if len(ps) == 0 {
		if len(bad) > 0 {
			return errors.Join(bad...)
		}
		if len(c.Rank) > 0 {
			return fmt.Errorf("inspect: none of the %d recorders in %s is of rank %v", len(paths), c.Path, c.Rank)
		}
		return fmt.Errorf("inspect: no recorders (*%s) in %s: is a job running here, with this LOCKSTEP_RUNTIME_DIR?", record.Suffix, c.Path)
	}
	worlds := worldRanks(all)
	reading.Stop()
	reports := make([]*Process, len(ps))
	for i, p := range ps {
		reports[i] = p.report(worlds, c.Stuck, max(c.Last, 0))
		if c.Windows {
			reports[i].Connections = p.connections(worlds)
		}
	}
	if c.JSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		err = enc.Encode(reports)
	} else if c.Windows {
		c.windows(out, reports)
	} else {
		err = c.text(out, reports, single)
	}
	return errors.Join(append(bad, err)...)
}

func (c *Cmd) wants(p *process) bool {
	for _, r := range c.Rank {
		if r == p.header.Rank {
			return true
		}
	}
	return len(c.Rank) == 0
}

// find lists the recorders that a path names: of a runtime directory those of all users
// that may be read.
func find(path string) (paths []string, single bool, err error) {
	places, _ := record.Places(path)
	for _, p := range places {
		if p.Path != path && filepath.Dir(p.Path) != path {
			more, _ := record.List(p.Path) // another user's, as a rule
			paths = append(paths, more...)
		}
	}
	fi, err := os.Stat(path)
	if err != nil {
		if len(places) > 0 || path == record.DefaultDir() && errors.Is(err, os.ErrNotExist) {
			return paths, false, nil // nobody has run a job here yet, or users have directories of their own
		}
		return nil, false, err
	}
	if !fi.IsDir() {
		return []string{path}, true, nil
	}
	own, err := record.List(path)
	if err != nil {
		return nil, false, err
	}
	paths = append(paths, own...)
	// Logical nodes on one machine have a directory each.
	dirs, err := os.ReadDir(path)
	if err != nil {
		return nil, false, err
	}
	for _, d := range dirs {
		if d.IsDir() {
			more, err := record.List(filepath.Join(path, d.Name()))
			if err != nil && !errors.Is(err, os.ErrPermission) {
				return nil, false, err
			}
			paths = append(paths, more...)
		}
	}
	return paths, false, nil
}
