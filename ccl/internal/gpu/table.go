package gpu

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// tunedJSON is the table that there is without another. bench/cmd/gputune makes it of
// measurements; see docs/design/cuda.md, "Choice".
//
//go:embed tuned.json
var tunedJSON []byte

// Table says which algorithm operations take.
type Table struct {
	rows map[record.CollKind][]tableRow
	id   string // alike for tables that are alike
}

// tableRow is what a collective does with so many ranks.
type tableRow struct {
	from, to int
	plain    bool // of buffers in no window alone
	steps    []step
}

// step is one line of a tuning table: up to so many bytes (of the whole for AllReduce,
// Reduce and Broadcast, of one share for the others) this algorithm, on so many blocks at most.
type step struct {
	upTo   uint64
	algo   record.Algo
	blocks int
}

const never = ^uint64(0)

// plainBuffers is what tables call buffers in no window.
const plainBuffers = "plain"

// tableFile is a table as it is written. The last step of a row has no UpTo. Buffers is "plain"
// for rows of buffers in no window, which come before those without.
type tableFile struct {
	Version int `json:"version"`
	Rows    []struct {
		Collective string `json:"collective"`
		Ranks      [2]int `json:"ranks"`
		Buffers    string `json:"buffers,omitempty"`
		Steps      []struct {
			UpTo uint64 `json:"up_to,omitempty"`
			Algo string `json:"algo"`
			SMs  int    `json:"sms"`
		} `json:"steps"`
	} `json:"rows"`
}

// tableVersion is that of the format.
const tableVersion = 1

// ParseTable reads a table, the built-in one when there is nothing to read. Rows that a table
// lacks are those of the built-in one.
func ParseTable(text []byte) (*Table, error) {
	t := &Table{rows: map[record.CollKind][]tableRow{}}
	if len(text) > 0 {
		if err := t.read(text); err != nil {
			return nil, fmt.Errorf("table of GPU algorithms: %w", err)
		}
	}
	if err := t.read(tunedJSON); err != nil {
		return nil, fmt.Errorf("built-in table of GPU algorithms: %w", err)
	}
	t.id = fmt.Sprintf("%x", sha256.Sum256(append(text, tunedJSON...)))[:16]
	return t, nil
}

func (t *Table) read(text []byte) error {
	var f tableFile
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return err
	}
	if f.Version != tableVersion {
		return fmt.Errorf("version %d, want %d", f.Version, tableVersion)
	}
	for i, r := range f.Rows {
		coll, err := parseColl(r.Collective)
		if err != nil {
			return fmt.Errorf("row %d: %w", i, err)
		}
		if r.Buffers != "" && r.Buffers != plainBuffers {
			return fmt.Errorf("row %d: buffers %q, want %q or none", i, r.Buffers, plainBuffers)
		}
		row := tableRow{from: r.Ranks[0], to: r.Ranks[1], plain: r.Buffers == plainBuffers}
		if row.from < 1 || row.to < row.from {
			return fmt.Errorf("row %d: ranks %d to %d", i, row.from, row.to)
		}
		last := uint64(0)
		for k, s := range r.Steps {
			algo, err := ParseAlgo(s.Algo)
			switch {
			case err != nil:
				return fmt.Errorf("row %d, step %d: %w", i, k, err)
			case algo == record.AlgoNone:
				return fmt.Errorf("row %d, step %d: no algorithm", i, k)
			case s.SMs < 0 || s.SMs > kernels.MaxBlocks || s.SMs == 0 && algo != record.AlgoCopyEngine:
				return fmt.Errorf("row %d, step %d: %d multiprocessors, want 1 to %d", i, k, s.SMs, kernels.MaxBlocks)
			}
			if s.UpTo == 0 && k+1 == len(r.Steps) {
				s.UpTo = never
			}
			if s.UpTo <= last {
				return fmt.Errorf("row %d, step %d: up to %d bytes, after %d", i, k, s.UpTo, last)
			}
			last = s.UpTo
			row.steps = append(row.steps, step{s.UpTo, algo, s.SMs})
		}
		if last != never {
			return fmt.Errorf("row %d: its last step ends", i)
		}
		t.rows[coll] = append(t.rows[coll], row)
	}
	return nil
}

func parseColl(name string) (record.CollKind, error) {
	for k, row := range collectives {
		if len(row.kernels) > 1 && k.String() == name {
			return k, nil
		}
	}
	return 0, errors.New(strings.TrimSpace(fmt.Sprintf("%q is no collective that has a choice", name)))
}

// steps of a collective among so many ranks: of the first row for them, of plain buffers if
// there is one for those.
func (t *Table) steps(coll record.CollKind, ranks int, plain bool) []step {
	var found []step
	for _, r := range t.rows[coll] {
		switch {
		case ranks < r.from || ranks > r.to || r.plain && !plain:
		case r.plain == plain:
			return r.steps
		case found == nil:
			found = r.steps
		}
	}
	return found
}
