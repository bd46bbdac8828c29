package train

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// Config of one rank's run. All ranks must agree on all of it but Device and Loader.
type Config struct {
	DP, TP, PP int // their product is the world size
	Steps      int // 0: without end
	Seed       uint64
	Dir        string // checkpoints and the loss log
	Checkpoint int    // steps between checkpoints, 0: none
	// Pace is the least duration of a step. The computation is tiny; what a
	// GPU would compute in the meantime is time that the CPU is left alone.
	Pace time.Duration
	// Device of this rank, as world has it. On a GPU the operations are on device
	// memory; the arithmetic, which is tiny, stays on the CPU.
	Device ccl.Device
	// Loader, when set, is called where a step's data is read (faults outside communication go here).
	Loader func(ctx context.Context, step int) error
}

// Place of a rank: tensor-parallel ranks are neighbours, then pipeline stages,
// then replicas, so that with a node per replica only gradients cross nodes.
func (c *Config) place(rank int) (dp, pp, tp int) {
	return rank / (c.PP * c.TP), rank / c.TP % c.PP, rank % c.TP
}

// Validate says what cannot work.
func (c *Config) Validate(world int) error {
	switch {
	case c.DP < 1 || c.TP < 1 || c.PP < 1 || c.DP*c.TP*c.PP != world:
		return fmt.Errorf("train: dp %d × tp %d × pp %d must be the world size %d", c.DP, c.TP, c.PP, world)
	case hidden%c.TP != 0:
		return fmt.Errorf("train: tp %d must divide %d", c.TP, hidden)
	}
	return nil
}

// trainer is one rank.
type trainer struct {
	cfg           Config
	rec           *record.Writer
	world         *ccl.Comm
	dp, tp, pp    *ccl.Comm
	s             *ccl.Stream
	dpR, ppR, tpR int

	mem   *memory
	files files
	model *stage
	opt   adam
	shard []float32 // this replica's share of the gradient, after ReduceScatter
	y     []float32
	dx    []float32
	sums  []float32 // loss, samples, and how many want to stop
}

// ErrStopped is what a rank ends with whose job was told to stop before its last step. All ranks end with it after the
// same step, whichever of them was told.
var ErrStopped = errors.New("train: told to stop before the last step")

// Run trains until cfg.Steps or ctx ends, from the last checkpoint when there is one. When ctx ends on any rank it
// returns ErrStopped on all. It owns neither world nor rec.
func Run(ctx context.Context, cfg Config, world *ccl.Comm, rec *record.Writer) error {
	t, err := newTrainer(ctx, cfg, world, rec)
	if err == nil {
		err = t.train(ctx)
	}
	return t.close(ctx, err)
}

// newTrainer makes the communicators and the model. What it returns must be closed, also
// after an error.
func newTrainer(ctx context.Context, cfg Config, world *ccl.Comm, rec *record.Writer) (*trainer, error) {
	t := &trainer{cfg: cfg, world: world, rec: rec}
	if err := cfg.Validate(world.Size()); err != nil {
		return t, err
	}
	t.dpR, t.ppR, t.tpR = cfg.place(world.Rank())
	for _, d := range []struct {
		comm       **ccl.Comm
		color, key int
		name       string
	}{
		{&t.dp, t.ppR*cfg.TP + t.tpR, t.dpR, "dp"},
		{&t.tp, t.dpR*cfg.PP + t.ppR, t.tpR, "tp"},
		{&t.pp, t.dpR*cfg.TP + t.tpR, t.ppR, "pp"},
	} {
		var err error
		if *d.comm, err = world.Split(ctx, d.color, d.key, fmt.Sprintf("%s%d", d.name, d.color)); err != nil {
			return t, fmt.Errorf("split %s: %w", d.name, err)
		}
	}
	t.s = world.NewStream()
	return t, t.build(ctx)
}

// train makes steps.
func (t *trainer) train(ctx context.Context) error {
	cfg := &t.cfg
	var err error
	if t.files, err = openFiles(cfg.Dir); err != nil {
		return err
	}
	start, err := t.restore(ctx)
	if err != nil {
		return err
	}
	log, err := openLossLog(t.files, start, t.world.Rank() == 0)
	if err != nil {
		return err
	}
	defer log.Close()
	for step := start + 1; cfg.Steps == 0 || step <= cfg.Steps; step++ {
		began := time.Now()
		t.mark(record.MarkStep, 0, uint64(step))
		loss, stop, err := t.step(ctx, step)
		if err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
		if err := log.write(step, loss); err != nil {
			return err
		}
		if cfg.Checkpoint > 0 && step%cfg.Checkpoint == 0 {
			if err := t.checkpoint(ctx, step); err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
		}
		if stop && (cfg.Steps == 0 || step < cfg.Steps) {
			return ErrStopped
		}
		if d := cfg.Pace - time.Since(began); d > 0 {
			time.Sleep(d)
		}
	}
	return nil
}

// build makes the model and the memory that it lies in.
func (t *trainer) build(ctx context.Context) (err error) {
	cfg := &t.cfg
	_, most := size(cfg.TP, true, cfg.DP)
	n := room(nsums) + (1+3*micro)*room(batch*features) + 3*room(most)
	if t.mem, err = newMemory(ctx, cfg.Device, n, t.world, t.dp, t.tp, t.pp); err != nil {
		return err
	}
	t.sums, t.dx, t.y = t.mem.take(nsums), t.mem.take(batch*features), make([]float32, batch)
	t.model = newStage(cfg.TP, t.ppR == cfg.PP-1, cfg.DP, t.mem.take)
	t.model.init(cfg.Seed, t.ppR, t.tpR)
	n = len(t.model.params) / cfg.DP
	t.shard = t.mem.take(n)
	t.opt = adam{m: make([]float32, n), v: make([]float32, n), lr: 3e-3}
	return nil
}

const nsums = 3

// close leaves the communicators that newTrainer made. After a failure nobody waits
// for the others.
func (t *trainer) close(ctx context.Context, err error) error {
	if orderly(err) {
		err = cmp.Or(t.mem.deregister(context.WithoutCancel(ctx)), err)
	}
	for _, c := range t.comms() {
		err = leave(c, err)
	}
	if orderly(err) {
		err = cmp.Or(t.mem.free(), err)
	}
	return err
}

// orderly reports whether all ranks end alike: nobody needs to be told.
func orderly(err error) bool { return err == nil || errors.Is(err, ErrStopped) }

// comms are the communicators that there are, world aside.
func (t *trainer) comms() []*ccl.Comm {
	return slices.DeleteFunc([]*ccl.Comm{t.pp, t.tp, t.dp}, func(c *ccl.Comm) bool { return c == nil })
}

// leave closes a communicator; after a failure it aborts it, so that the
// others hear of it at once and do not wait for this rank.
func leave(c *ccl.Comm, err error) error {
	if !orderly(err) {
		c.Abort(err)
		return err
	}
	return cmp.Or(c.Close(), err)
}

// step runs one training step over all micro-batches.
func (t *trainer) step(ctx context.Context, step int) (loss float64, stop bool, err error) {
	if t.cfg.Loader != nil {
		if err := t.cfg.Loader(ctx, step); err != nil {
			return 0, false, err
		}
	}
	first, last := t.ppR == 0, t.ppR == t.cfg.PP-1
	clear(t.model.grads)
	clear(t.sums)
	for m := range micro {
		a := &t.model.activation[m]
		if first {
			sample(t.cfg.Seed, step, t.dpR, m, a.x, t.y)
		} else if err := t.recv(ctx, a.x, t.ppR-1); err != nil {
			return 0, false, err
		}
		t.model.forward(m)
		if err := t.allReduce(ctx, t.tp, a.out); err != nil {
			return 0, false, err
		}
		t.model.finish(m)
		if !last {
			if err := t.send(ctx, a.out, t.ppR+1); err != nil {
				return 0, false, err
			}
		}
	}
	for m := range micro {
		a := &t.model.activation[m]
		if last {
			x := t.dx // the last stage needs only the answers of the data set
			sample(t.cfg.Seed, step, t.dpR, m, x, t.y)
			sum := t.model.loss(m, t.y)
			if t.tpR == 0 { // the head is the same on all tensor-parallel ranks: count it once
				t.sums[0] += float32(sum)
				t.sums[1] += batch
			}
		} else if err := t.recv(ctx, a.dout, t.ppR+1); err != nil {
			return 0, false, err
		}
		t.model.backward(m, t.dx)
		if err := t.allReduce(ctx, t.tp, t.dx); err != nil {
			return 0, false, err
		}
		if !first {
			t.model.finishBackward(m, t.dx)
			if err := t.send(ctx, t.dx, t.ppR-1); err != nil {
				return 0, false, err
			}
		}
	}
	if err := t.update(ctx, step); err != nil {
		return 0, false, err
	}
	// Who has been told to stop says so to all, so that all stop after the same step.
	if ctx.Err() != nil {
		t.sums[2] = 1
	}
	if err := t.allReduce(ctx, t.world, t.sums); err != nil {
		return 0, false, err
	}
	return float64(t.sums[0]) / float64(t.sums[1]), t.sums[2] > 0, nil
}

// update sums the gradients over the replicas and takes the optimizer's step, each
// replica on its shard.
func (t *trainer) update(ctx context.Context, step int) error {
	grads, params := t.model.grads, t.model.params
	if err := t.mem.load(grads); err != nil {
		return err
	}
	if err := t.do(ctx, t.dp.ReduceScatter(t.s, t.mem.buffer(grads), t.mem.buffer(t.shard), ccl.Sum)); err != nil {
		return err
	}
	if err := t.mem.store(t.shard); err != nil {
		return err
	}
	mine := params[t.dpR*len(t.shard):][:len(t.shard)]
	t.opt.step(step, mine, t.shard, 1/float32(micro*t.cfg.DP))
	if err := t.mem.load(mine); err != nil {
		return err
	}
	if err := t.do(ctx, t.dp.AllGather(t.s, t.mem.buffer(mine), t.mem.buffer(params))); err != nil {
		return err
	}
	return t.mem.store(params)
}

func (t *trainer) allReduce(ctx context.Context, c *ccl.Comm, v []float32) error {
	if err := t.mem.load(v); err != nil {
		return err
	}
	b := t.mem.buffer(v)
	if err := t.do(ctx, c.AllReduce(t.s, b, b, ccl.Sum)); err != nil {
		return err
	}
	return t.mem.store(v)
}

func (t *trainer) send(ctx context.Context, v []float32, stage int) error {
	if err := t.mem.load(v); err != nil {
		return err
	}
	return t.do(ctx, t.pp.Send(t.s, t.mem.buffer(v), stage))
}

func (t *trainer) recv(ctx context.Context, v []float32, stage int) error {
	if err := t.do(ctx, t.pp.Recv(t.s, t.mem.buffer(v), stage)); err != nil {
		return err
	}
	return t.mem.store(v)
}

// do waits for what was just enqueued.
func (t *trainer) do(ctx context.Context, err error) error {
	if err != nil {
		return err
	}
	return t.s.Wait(context.WithoutCancel(ctx))
}

func (t *trainer) checkpoint(ctx context.Context, step int) error {
	t.mark(record.MarkCheckpoint, record.FlagBegin, uint64(step))
	defer t.mark(record.MarkCheckpoint, 0, uint64(step))
	if err := saveShard(t.files, step, t.world.Rank(), t.model.params, t.opt.m, t.opt.v); err != nil {
		return err
	}
	if err := t.do(ctx, t.world.Barrier(t.s)); err != nil {
		return err
	}
	if t.world.Rank() == 0 {
		return commit(t.files, step)
	}
	return nil
}

// restore loads the last checkpoint; rank 0 says which, so that all take the same.
func (t *trainer) restore(ctx context.Context) (step int, err error) {
	from := []int64{0}
	if t.world.Rank() == 0 {
		if step, err = Latest(t.cfg.Dir); err != nil {
			return 0, err
		}
		from[0] = int64(step)
	}
	if err := t.do(ctx, t.world.Broadcast(t.s, ccl.Of(from), ccl.Of(from), 0)); err != nil {
		return 0, err
	}
	if step = int(from[0]); step == 0 {
		return 0, nil
	}
	return step, t.load(step)
}

// load reads this rank's part of a checkpoint. With other replicas than it was
// written by, whose optimizers had other shards, the parts are put together anew.
func (t *trainer) load(step int) error {
	parts, err := shards(t.cfg.Dir, step)
	if err != nil || parts == t.world.Size() {
		return errors.Join(err, loadShard(t.cfg.Dir, step, t.world.Rank(), t.model.params, t.opt.m, t.opt.v))
	}
	if t.cfg.TP*t.cfg.PP != 1 {
		return fmt.Errorf("checkpoint of step %d has %d parts: only replicas (tp 1, pp 1) can be more or fewer", step, parts)
	}
	n, padded := size(1, true, parts)
	params, m, v := make([]float32, padded), make([]float32, padded), make([]float32, padded)
	part := padded / parts
	for r := range parts {
		if err := loadShard(t.cfg.Dir, step, r, params, m[r*part:][:part], v[r*part:][:part]); err != nil {
			return err
		}
	}
	copy(t.model.params, params[:n])
	from := min(t.dpR*len(t.shard), n)
	copy(t.opt.m, m[from:n])
	copy(t.opt.v, v[from:n])
	return nil
}

func (t *trainer) mark(code record.MarkCode, flags uint8, value uint64) {
	t.rec.Append(&record.Record{Mono: record.Now(), Kind: record.KindMark, Flags: flags, Code: uint8(code), Value: value})
}

// lossLog is a text file of "step loss", the loss in hexadecimal so that equal means equal bits.
type lossLog struct{ f io.Writer }

// LossLog is the loss log's name in Config.Dir.
const LossLog = "loss.txt"

// openLossLog opens the log and drops what a former attempt wrote past its checkpoint.
func openLossLog(in files, from int, writer bool) (*lossLog, error) {
	if !writer {
		return &lossLog{}, nil
	}
	path := filepath.Join(in.dir, LossLog)
	keep, err := ReadLosses(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// Another file in its place: a former attempt may have the old one open still.
	var b bytes.Buffer
	l := &lossLog{&b}
	for i := range min(from, len(keep)) {
		if err := l.write(i+1, keep[i]); err != nil {
			return nil, err
		}
	}
	if err := in.write(LossLog, b.Bytes()); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("loss log: %w", err)
	}
	return &lossLog{f}, nil
}

func (l *lossLog) write(step int, loss float64) error {
	if l.f == nil {
		return nil
	}
	_, err := fmt.Fprintf(l.f, "%d %s\n", step, strconv.FormatFloat(loss, 'x', -1, 64))
	return err
}

func (l *lossLog) Close() error {
	if f, ok := l.f.(*os.File); ok {
		return f.Close()
	}
	return nil
}

// ReadLosses reads a loss log: element i is step i+1's loss. A last line that
// is not complete is left out: its writer was killed.
func ReadLosses(path string) ([]float64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []float64
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return out, nil
		}
		step, loss, ok := strings.Cut(strings.TrimSpace(line), " ")
		v, err1 := strconv.ParseFloat(loss, 64)
		n, err2 := strconv.Atoi(step)
		if !ok || err1 != nil || err2 != nil || n != len(out)+1 {
			return out, fmt.Errorf("%s: line %d: %.64q is not step %d and its loss", path, len(out)+1, line, len(out)+1)
		}
		out = append(out, v)
	}
}
