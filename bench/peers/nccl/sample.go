package nccl

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
)

// A Library is whose collectives were measured.
type Library int

// In the order of a table's columns.
const (
	Lockstep Library = iota
	NCCL
)

func (l Library) String() string { return [...]string{"Lockstep", "NCCL"}[l] }

// Series is what measurements must have in common to be in one table.
type Series struct {
	Coll   string // in nccl-tests' spelling: all_reduce, all_gather, …
	Ranks  int    // GPUs
	Launch string // stream or graph
	Type   string // of an element, as float32
}

// Sample is one measured size.
type Sample struct {
	Series
	Library Library
	// Mode is default, registered (buffers in windows) or ce (NCCL's copy engines).
	Mode  string
	Bytes int // of the larger buffer of a rank

	Micros float64 // of one operation
	Bus    float64 // GB/s
	Wrong  int     // elements; -1: not checked
	Algo   string  // which algorithm ran, if that was told
	SMs    int     // and on how many multiprocessors
}

// spelling maps names without underscores to nccl-tests'.
var spelling = map[string]string{
	"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "alltoall",
	"broadcast": "broadcast", "reduce": "reduce", "sendrecv": "sendrecv", "gather": "gather", "scatter": "scatter",
}

// line is the union of what both programs print.
type line struct {
	Test string // set by lines that measure something else, a GEMM

	// nccl.cu
	Lib    string
	Coll   string
	Bytes  int
	Mode   string
	Micros float64 `json:"us"`
	Bus    float64 `json:"busbw"`
	Wrong  int

	// lockstep perf
	Collective string
	Size       int
	Device     string
	Registered bool
	Algo       string
	SMs        int
	OutOfPlace *struct {
		Micros float64 `json:"us"`
		Bus    float64 `json:"busbw"`
		Wrong  int
	} `json:"out_of_place"`

	// both
	Type   string
	Ranks  int
	Launch string
}

// Read returns the measurements in r, of either program or of both mixed. It
// passes over lines that are no JSON objects (libraries print notices) and over
// measurements of CPU ranks, of a GEMM and of nothing at all (a size too small
// for the ranks to share).
func Read(r io.Reader) ([]Sample, error) {
	var samples []Sample
	in := bufio.NewScanner(r)
	in.Buffer(nil, 1<<20)
	for n := 1; in.Scan(); n++ {
		text := bytes.TrimSpace(in.Bytes())
		if !bytes.HasPrefix(text, []byte("{")) {
			continue
		}
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if l.Test != "" || l.Lib == "" && l.Device != "cuda" {
			continue
		}
		s, err := l.sample()
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if s.Bytes > 0 {
			samples = append(samples, s)
		}
	}
	return samples, in.Err()
}

func (l *line) sample() (Sample, error) {
	s := Sample{
		Series:  Series{Coll: l.Coll, Ranks: l.Ranks, Launch: l.Launch, Type: l.Type},
		Library: NCCL, Mode: l.Mode, Bytes: l.Bytes, Micros: l.Micros, Bus: l.Bus, Wrong: l.Wrong,
	}
	switch {
	case l.Lib == "nccl":
	case l.OutOfPlace == nil:
		return s, fmt.Errorf("neither a measurement of nccl nor one of lockstep perf")
	default:
		s.Library, s.Mode, s.Algo, s.SMs = Lockstep, "default", l.Algo, l.SMs
		if l.Registered {
			s.Mode = "registered"
		}
		s.Coll, s.Bytes = l.Collective, l.Size
		s.Micros, s.Bus, s.Wrong = l.OutOfPlace.Micros, l.OutOfPlace.Bus, l.OutOfPlace.Wrong
	}
	if s.Launch == "" {
		s.Launch = "stream"
	}
	name, known := spelling[strings.ReplaceAll(strings.TrimSuffix(strings.ToLower(s.Coll), "_perf"), "_", "")]
	switch {
	case !known:
		return s, fmt.Errorf("collective %q is not known", s.Coll)
	case s.Bytes < 0 || s.Bytes > 0 && !(s.Micros > 0) || math.IsInf(s.Micros, 0):
		return s, fmt.Errorf("%s of %d bytes in %g µs", s.Coll, s.Bytes, s.Micros)
	}
	s.Coll = name
	return s, nil
}
