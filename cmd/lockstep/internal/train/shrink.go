package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// Shrunk is one time that replicas went on without others, as the new rank 0 saw it. Times
// are ms since the kill (see Killed), or since this rank noticed when that is not known.
type Shrunk struct {
	Lost      []int   `json:"lost"` // ranks of the communicator before
	From      int     `json:"from"`
	To        int     `json:"to"`
	Resumed   int     `json:"from_step"` // the checkpoint that they go on from
	FromKill  bool    `json:"from_kill"`
	Noticed   float64 `json:"noticed_ms"`          // the pending operation has failed
	Shrink    float64 `json:"shrunk_ms"`           // the communicator of the survivors is there
	GoodFirst float64 `json:"first_collective_ms"` // its first AllReduce has ended
	Step      float64 `json:"ready_ms"`            // the replicas are built anew, and train
}

// ShrinkLog is the name in Config.Dir of the file that RunElastic appends each Shrunk to, a
// JSON object a line.
const ShrinkLog = "shrinks.jsonl"

// Killed notes the time at which a rank is about to be killed, for Shrunk.
func Killed(dir string) error {
	return os.WriteFile(killedFile(dir), []byte(strconv.FormatInt(record.Now(), 10)), 0o600)
}

func killedFile(dir string) string { return filepath.Join(dir, "killed") }

// lossPatience is how long a rank that heard of a failure waits to hear who was lost.
const lossPatience = 5 * time.Second

// RunElastic is Run, but replicas that have lost others go on without them, from the last
// checkpoint: they shrink the world to the survivors. It needs a model that is whole on each
// rank (tp 1, pp 1). It takes over world.
func RunElastic(ctx context.Context, cfg Config, world *ccl.Comm, rec *record.Writer) error {
	if cfg.TP*cfg.PP != 1 {
		return leave(world, fmt.Errorf("train: dp %d × tp %d × pp %d: only replicas (tp 1, pp 1) can go on without others", cfg.DP, cfg.TP, cfg.PP))
	}
	var event *Shrunk
	var since int64
	for {
		t, err := newTrainer(ctx, cfg, world, rec)
		if err == nil && event != nil {
			event.Step = ms(since)
			err = event.tell(&cfg, world.Rank())
			event = nil
		}
		if err == nil {
			err = t.train(ctx)
		}
		if orderly(err) {
			return leave(world, t.close(ctx, err))
		}
		noticed := record.Now()
		lost, ok := lostRank(ctx, world)
		if !ok {
			return leave(world, t.close(ctx, err))
		}
		event = &Shrunk{Lost: []int{lost}, From: world.Size(), To: world.Size() - 1}
		since, event.FromKill = killedAt(noticed)
		event.Noticed = float64(noticed-since) / 1e6
		smaller, err := world.Shrink(ctx, event.Lost, ccl.ShrinkAbort, world.Name())
		if err != nil {
			return leave(world, t.close(ctx, err))
		}
		event.Shrink = ms(since)
		// Nobody hears of what the former communicators end with: it is known.
		for _, c := range append(t.comms(), world) {
			c.Abort(nil)
			_ = c.Close()
		}
		_ = t.mem.free()
		world, cfg.DP = smaller, smaller.Size()
		if err := first(ctx, world, cfg.Device); err != nil {
			return leave(world, err)
		}
		event.GoodFirst = ms(since)
	}
}

func ms(since int64) float64 { return float64(record.Now()-since) / 1e6 }

// lostRank waits until world knows which of its ranks is gone; false when none is.
func lostRank(ctx context.Context, world *ccl.Comm) (rank int, ok bool) {
	for begun := time.Now(); time.Since(begun) < lossPatience && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		err := world.Err()
		if e := (*ccl.Error)(nil); errors.As(err, &e) {
			return e.Peer, e.Peer >= 0 && errors.Is(err, ccl.ErrPeerLost)
		}
	}
	return -1, false
}

// killedAt is when the rank was killed: as Killed has noted, else when it was noticed.
func killedAt(noticed int64) (at int64, known bool) {
	if dir := os.Getenv(FaultDirEnv); dir != "" {
		if b, err := os.ReadFile(killedFile(dir)); err == nil {
			if at, err := strconv.ParseInt(string(b), 10, 64); err == nil && at < noticed {
				return at, true
			}
		}
	}
	return noticed, false
}

// first is a world's first collective.
func first(ctx context.Context, world *ccl.Comm, device ccl.Device) error {
	m, err := newMemory(ctx, device, room(1), world)
	if err != nil {
		return err
	}
	one := m.take(1)
	one[0] = 1
	t := &trainer{world: world, mem: m, s: world.NewStream()}
	if err := t.allReduce(ctx, world, one); err != nil {
		return err
	}
	if int(one[0]) != world.Size() {
		return fmt.Errorf("the first AllReduce of %d survivors says that they are %v", world.Size(), one[0])
	}
	if err := m.deregister(ctx); err != nil {
		return err
	}
	return m.free()
}

// tell writes the event down, on rank 0.
func (s *Shrunk) tell(cfg *Config, rank int) error {
	if rank != 0 {
		return nil
	}
	var err error
	if s.Resumed, err = Latest(cfg.Dir); err != nil {
		return err
	}
	since := "the kill"
	if !s.FromKill {
		since = "it was noticed"
	}
	fmt.Printf("lost rank %d of %d; since %s: %.1f ms noticed, %.1f ms shrunk to %d, %.1f ms first AllReduce, %.1f ms training\n",
		s.Lost[0], s.From, since, s.Noticed, s.Shrink, s.To, s.GoodFirst, s.Step)
	f, err := os.OpenFile(filepath.Join(cfg.Dir, ShrinkLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(json.NewEncoder(f).Encode(s), f.Close())
}

// ReadShrinks reads the shrink log in dir; there may be none.
func ReadShrinks(dir string) (all []Shrunk, err error) {
	f, err := os.Open(filepath.Join(dir, ShrinkLog))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for d := json.NewDecoder(f); ; {
		var s Shrunk
		if err := d.Decode(&s); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		all = append(all, s)
	}
}
