package peers

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
)

type fake struct {
	name   string
	rounds [][]Sample
	err    error
}

func (f *fake) Name() string { return f.name }

func (f *fake) Run(context.Context, Case) ([]Sample, error) {
	if f.err != nil {
		return nil, f.err
	}
	s := f.rounds[0]
	f.rounds = f.rounds[1:]
	return s, nil
}

func TestCompare(t *testing.T) {
	c := Case{Coll: "allreduce", Ranks: 2, Transport: "shm"}
	them := &fake{name: "them", rounds: [][]Sample{
		{{8, 1}, {16, 10}, {32, 7}},
		{{8, 100}, {16, 30}, {32, 7}},
		{{8, 3}, {16, 20}, {32, 7}},
	}}
	us := &fake{name: "us", rounds: [][]Sample{{{8, 6}, {16, 10}}, {{8, 6}, {16, 10}}, {{8, 1}, {16, 10}}}}
	lines, err := Compare(t.Context(), []Peer{them, us}, c, 3, Median)
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) != 2 {
		t.Fatalf("%d lines, want the 2 sizes that both measured: %v", len(lines), lines)
	}
	if l := lines[0]; l.Bytes != 8 || l.Micros[0] != 3 || l.Micros[1] != 6 || l.Ratio() != 2 {
		t.Errorf("8 bytes: %+v with ratio %v, want medians 3 and 6", l, l.Ratio())
	}
	if l := lines[1]; l.Bytes != 16 || l.Ratio() != 0.5 {
		t.Errorf("16 bytes: %+v with ratio %v, want 0.5", l, l.Ratio())
	}

	var out bytes.Buffer
	Summary(&out, lines)
	fields := strings.Fields(strings.Split(out.String(), "\n")[1])
	if got, want := strings.Join(fields, " "), "allreduce 2 shm 1.00 1 of 2 2.00 8"; got != want {
		t.Errorf("summary %q, want %q", got, want)
	}
}

func TestCompareNamesWhatFailed(t *testing.T) {
	broken := errors.New("broken")
	_, err := Compare(t.Context(), []Peer{&fake{name: "them", err: broken}}, Case{Coll: "alltoall", Ranks: 8, Transport: "tcp"}, 1, Median)
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "them: alltoall, 8 ranks, tcp") {
		t.Errorf("error %v does not name the peer and the case", err)
	}
}

func TestMPI(t *testing.T) {
	bin, err := BuildMPI(t.Context(), t.TempDir())
	if errors.Is(err, ErrNoMPI) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	mpi := NewMPI("OpenMPI", bin)
	for _, transport := range []string{"shm", "tcp"} {
		c := Case{Coll: "allgather", Ranks: 2, Transport: transport, Min: 4, Max: 64, Factor: 4}
		samples, err := mpi.Run(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if len(samples) != 2 || samples[0].Bytes != 16 || samples[1].Bytes != 64 || samples[0].Micros <= 0 {
			t.Errorf("%v: %v, want 16 and 64 bytes (4 cannot be shared)", c, samples)
		}
	}
	if _, err := mpi.Run(t.Context(), Case{Coll: "nonsense", Ranks: 1, Transport: "shm", Min: 4, Max: 8, Factor: 2}); err == nil {
		t.Error("a collective that mpibench does not know gave no error")
	}
}

func TestParseMPI(t *testing.T) {
	for _, line := range []string{"", "allreduce", "allreduce 2 8 100 x 2", "alltoall 2 8 1 1 1", "warning: something"} {
		if s, err := parseMPI([]byte(line+"\n"), Case{Coll: "allreduce", Ranks: 2}); err == nil {
			t.Errorf("%q gave %v, want an error", line, s)
		}
	}
}

func TestParseLockstep(t *testing.T) {
	c := Case{Coll: "allreduce", Ranks: 2}
	const line = `{"collective":"allreduce","size":8,"count":2,"type":"float32","ranks":2,"out_of_place":{"us":1.5,"algbw":0.1},"in_place":{"us":9}}`
	samples, err := parseLockstep([]byte(line+"\n"), c)
	if err != nil || len(samples) != 1 || samples[0] != (Sample{8, 1.5}) {
		t.Errorf("got %v, %v, want 8 bytes in 1.5 µs", samples, err)
	}
	for _, line := range []string{"", "#", "{}", `{"collective":"allgather","ranks":2}`, `{"collective":"allreduce","ranks":8}`} {
		if s, err := parseLockstep([]byte(line+"\n"), c); err == nil {
			t.Errorf("%q gave %v, want an error", line, s)
		}
	}
}
