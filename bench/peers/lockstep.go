package peers

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
)

// Lockstep measures with `lockstep perf`, flight recorder on.
type Lockstep struct{ binary string }

// NewLockstep returns a peer that runs the lockstep binary.
func NewLockstep(binary string) (*Lockstep, error) {
	path, err := exec.LookPath(binary)
	if err != nil {
		return nil, fmt.Errorf("lockstep binary: %w (make build leaves it in bin/lockstep)", err)
	}
	path, err = filepath.Abs(path)
	return &Lockstep{path}, err
}

func (l *Lockstep) Name() string { return "Lockstep" }

func (l *Lockstep) Run(ctx context.Context, c Case) ([]Sample, error) {
	nodes := 1
	switch c.Transport {
	case "shm":
	case "tcp":
		nodes = c.Ranks // each rank is a node of its own
	default:
		return nil, fmt.Errorf("unknown transport %q", c.Transport)
	}
	out, err := output(command(ctx, l.binary, "perf", c.Coll, "--json", "-c", "0",
		"-b", strconv.Itoa(c.Min), "-e", strconv.Itoa(c.Max), "-f", strconv.Itoa(c.Factor),
		"--ranks", strconv.Itoa(c.Ranks), "--nodes", strconv.Itoa(nodes)))
	if err != nil {
		return nil, err
	}
	return parseLockstep(out, c)
}

func parseLockstep(out []byte, c Case) ([]Sample, error) {
	var samples []Sample
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		var r struct {
			Collective string
			Size       int
			Ranks      int
			OutOfPlace struct {
				Micros float64 `json:"us"`
			} `json:"out_of_place"`
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil || r.Collective != c.Coll || r.Ranks != c.Ranks {
			return nil, fmt.Errorf("lockstep perf printed %q, which is no measurement of this case", lines.Text())
		}
		if r.Size > 0 { // else there was less than an element for each rank
			samples = append(samples, Sample{Bytes: r.Size, Micros: r.OutOfPlace.Micros})
		}
	}
	return samples, lines.Err()
}
