package main

import (
	"context"
	"io"
	"log/slog"
	"math"
	"os"
	"runtime"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// recordedRanks is the job of which a pass is recorded: one of the largest that train.
const recordedRanks = 32768

// recording times what a pass of a large job waits for when its evidence is
// recorded, and what writing it takes beside the passes when all ranks have news and
// when those of one node in a hundred have.
func recording() ([]row, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	ev := largeJob()
	shrink(ev, recordedRanks)
	wait, err := recordPass(ev)
	if err != nil {
		return nil, err
	}
	w, err := replay.NewWriter(io.Discard, replay.Header{})
	if err != nil {
		return nil, err
	}
	write := func(number uint64) (time.Duration, error) {
		start := time.Now()
		err := w.Write(number, ev, nil)
		return time.Since(start), err
	}
	if _, err := write(1); err != nil {
		return nil, err
	}
	all, some := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	for i := range uint64(rounds) {
		advance(ev, -1)
		ev.Arrivals = nil // they are of the whole job
		took, err := write(2 * (i + 1))
		if err != nil {
			return nil, err
		}
		all = min(all, took)
		tick(ev, passEvery)
		for c := range ev.Comms {
			for m := range ev.Comms[c].Members {
				if k := &ev.Comms[c].Members[m]; k.World/tensor%100 == int32(i) {
					k.Finished, k.FinishedAt = k.Finished+1, ev.Now
				}
			}
		}
		if took, err = write(2*(i+1) + 1); err != nil {
			return nil, err
		}
		some = min(some, took)
	}
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	return []row{
		{"recording_pass_waits", ms(wait), "ms", 25},
		{"recording_write_all", ms(all), "ms", 500},
		{"recording_write_hundredth", ms(some), "ms", 100},
	}, nil
}

// recordPass is the shortest time that Record takes.
func recordPass(ev *diagnosis.Evidence) (time.Duration, error) {
	dir, err := os.MkdirTemp("", "recording")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	best := time.Duration(math.MaxInt64)
	for range rounds {
		r, err := replay.NewRecorder(replay.RecorderOptions{Dir: dir, Job: ev.Job, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return 0, err
		}
		for range 3 { // the second is into memory that is there
			start := time.Now()
			r.Record(ev, nil)
			best = min(best, time.Since(start))
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			r.Run(ctx)
		}
	}
	return best, nil
}

// shrink leaves the first ranks of a job, with what they are in.
func shrink(ev *diagnosis.Evidence, ranks int) {
	ev.Ranks, ev.Nodes = ev.Ranks[:ranks], ev.Nodes[:ranks/tensor]
	moved := make([]int32, len(ev.Comms))
	var comms []diagnosis.Comm
	for c := range ev.Comms {
		moved[c] = -1
		x := ev.Comms[c]
		n := 0
		for n < len(x.Members) && int(x.Members[n].World) < ranks {
			n++
		}
		if n > 0 {
			moved[c] = int32(len(comms))
			x.Members = x.Members[:n]
			comms = append(comms, x)
		}
	}
	ev.Comms, ev.Arrivals = comms, nil
	var conns []diagnosis.Conn
	for _, k := range ev.Conns {
		if k.Comm = moved[k.Comm]; k.Comm >= 0 && int(max(k.Src, k.Dst)) < len(comms[k.Comm].Members) {
			conns = append(conns, k)
		}
	}
	ev.Conns = conns
}
