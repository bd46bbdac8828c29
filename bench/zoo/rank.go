package zoo

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// Environment of a rank, beside the launcher's.
const (
	EnvDir   = "ZOO_DIR"   // loss logs and control files
	EnvHabit = "ZOO_HABIT" // of handling errors
	EnvLife  = "ZOO_LIFE"  // after so long the rank ends itself, whatever happens
	EnvSpin  = "ZOO_SPIN"  // share of computing that takes the CPU
)

// Habit is what a program does about an error of a collective.
type Habit string

// Habits of frameworks.
const (
	Fatal     Habit = "fatal"      // log, exit 1 without Close
	Panic     Habit = "panic"      // exit 2 with a stack
	AbortAll  Habit = "abort_all"  // abort every communicator, then exit 1
	AbortOne  Habit = "abort_one"  // abort the communicator that failed, then exit 1
	Sleep     Habit = "sleep"      // catch it and wait for somebody to look
	RetryOnce Habit = "retry_once" // try once more, then exit 1
	Handler   Habit = "handler"    // as fatal; SIGTERM is handled, and ends with status 0
)

// Habits lists them.
var Habits = []Habit{Fatal, Panic, AbortAll, AbortOne, Sleep, RetryOnce, Handler}

// Rank is one process of a job.
type Rank struct {
	job    *Job
	habit  Habit
	ctl    *control
	world  *ccl.Comm
	s      *ccl.Stream
	comms  []*ccl.Comm
	log    *os.File
	step   int
	drifts int        // since this step
	random *rand.Rand // the same on all ranks
	own    *rand.Rand
}

// Main runs a rank of a job to its end, and does not return when the rank fails.
func Main(job *Job) {
	log.SetFlags(log.Ltime | log.Lmicroseconds)
	log.SetPrefix("rank " + os.Getenv("LOCKSTEP_RANK") + ": ")
	if life, err := time.ParseDuration(os.Getenv(EnvLife)); err == nil {
		time.AfterFunc(life, func() { log.Print("its time is over"); os.Exit(9) })
	}
	if share, err := strconv.ParseFloat(os.Getenv(EnvSpin), 64); err == nil {
		spun = share
	}
	r := &Rank{job: job, habit: Habit(os.Getenv(EnvHabit))}
	if r.habit == Handler {
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		go func() { <-c; log.Print("terminated"); os.Exit(0) }()
	}
	cfg, err := ccl.ConfigFromEnv()
	if err == nil {
		err = cfg.Prepare()
	}
	if err != nil {
		log.Fatal(err)
	}
	dir := os.Getenv(EnvDir)
	r.ctl = follow(dir, cfg.Rank)
	if r.log, err = os.Create(LossLog(dir, cfg.Rank)); err != nil {
		log.Fatal(err)
	}
	if r.world, err = ccl.Init(context.Background(), cfg); err != nil {
		log.Fatal(err)
	}
	seed := uint64(len(job.Name))
	for _, b := range []byte(job.Name) {
		seed = seed*131 + uint64(b)
	}
	r.random = rand.New(rand.NewPCG(seed, 1))
	r.own = rand.New(rand.NewPCG(seed, 2+uint64(cfg.Rank)))
	r.comms, r.s = []*ccl.Comm{r.world}, r.world.NewStream()
	if err := job.run(r); err != nil {
		r.fail(err)
	}
}

// fail does what the habit is. It does not return.
func (r *Rank) fail(err error) {
	switch r.habit {
	case Panic:
		panic(err)
	case AbortAll:
		for _, c := range r.comms {
			c.Abort(err)
		}
	case AbortOne:
		var e *ccl.Error
		for _, c := range r.comms {
			if errors.As(err, &e) && e.Comm == c.Name() {
				c.Abort(err)
				break
			}
		}
	case Sleep:
		log.Print("gave up, waiting: ", err)
		select {}
	}
	log.Fatal(err)
}

func (r *Rank) rank() int { return r.world.Rank() }
func (r *Rank) size() int { return r.world.Size() }

// split makes a communicator of the ranks of one color.
func (r *Rank) split(name string, color, key int) (*ccl.Comm, error) {
	c, err := r.world.Split(context.Background(), color, key, name)
	if c != nil {
		r.comms = append(r.comms, c)
	}
	return c, err
}

// spun is the share of computing that takes the CPU; the rest is asleep, as a CPU that
// waits for its GPU is.
var spun = 0.12

// compute takes d, longer where the rank's orders say so.
func (r *Rank) compute(d time.Duration) {
	o := r.ctl.order.Load()
	f := o.Factor
	if f == 0 {
		f = 1
	}
	if o.Drift != 0 {
		if r.drifts == 0 {
			r.drifts = r.step
		}
		f += o.Drift * float64(r.step-r.drifts)
	}
	d = time.Duration(float64(d) * f)
	spin := time.Duration(float64(d) * spun)
	began := time.Now()
	work(spin)
	if rest := d - time.Since(began); rest > 0 {
		time.Sleep(min(rest, d-spin))
	}
}

// rate is how many rounds of work a millisecond of this CPU takes, when it has it alone.
var rate float64

// work computes for as long as d takes an idle CPU: who gets less of one takes longer.
func work(d time.Duration) {
	if rate == 0 {
		best := time.Hour
		for range 5 {
			began := time.Now()
			burn(20000)
			best = min(best, time.Since(began))
		}
		rate = 20000 / (float64(best) / 1e6)
	}
	burn(int(rate * float64(d) / 1e6))
}

var sink uint64

func burn(rounds int) {
	x := sink | 1
	for range rounds {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
	}
	sink = x
}

// next begins a step, with what the rank's orders have before one.
func (r *Rank) next() {
	r.step++
	o := r.ctl.order.Load()
	if o.PauseEvery > 0 && r.step%o.PauseEvery == 0 {
		time.Sleep(o.Pause)
	}
	if o.End == EndStuck {
		select {}
	}
}

// jitter is a duration that varies by a share, differently on each rank.
func (r *Rank) jitter(d time.Duration, share float64) time.Duration {
	return time.Duration(float64(d) * (1 + share*(2*r.own.Float64()-1)))
}

// call is one operation: a function that enqueues it on a stream.
type call func(s *ccl.Stream) error

// do carries out an operation, twice where the habit is to try again.
func (r *Rank) do(op call) error {
	err := r.once(op)
	if err != nil && r.habit == RetryOnce {
		log.Print("trying again after: ", err)
		time.Sleep(100 * time.Millisecond)
		err = r.once(op)
	}
	return err
}

func (r *Rank) once(op call) error {
	if err := op(r.s); err != nil {
		return err
	}
	return r.s.Wait(context.Background())
}

// allReduce sums v over c. It is where a rank skips a collective or calls another: of two
// that differ nobody could tell which one is wrong, so that takes a third.
func (r *Rank) allReduce(c *ccl.Comm, v []float32) error {
	if r.ctl.takeBug(BugSkip) {
		return nil
	}
	if c.Size() > 2 && r.ctl.takeBug(BugMismatch) {
		return r.do(func(s *ccl.Stream) error { return c.Broadcast(s, ccl.Of(v), ccl.Of(v), 0) })
	}
	return r.do(func(s *ccl.Stream) error { return c.AllReduce(s, ccl.Of(v), ccl.Of(v), ccl.Sum) })
}

// both carries out two operations in this order, or in the other where the rank has
// that bug.
func (r *Rank) both(a, b call) error {
	if r.ctl.takeBug(BugSwap) {
		a, b = b, a
	}
	if err := r.do(a); err != nil {
		return err
	}
	return r.do(b)
}

// loss sums x over all ranks, which makes it the same on all, and writes it down.
func (r *Rank) loss(x float32) error {
	v := []float32{x}
	if err := r.do(func(s *ccl.Stream) error { return r.world.AllReduce(s, ccl.Of(v), ccl.Of(v), ccl.Sum) }); err != nil {
		return err
	}
	return r.write(v[0])
}

func (r *Rank) write(x float32) error {
	line := strconv.Itoa(r.step) + " " + strconv.FormatUint(uint64(math.Float32bits(x)), 16) + " " + strconv.FormatInt(time.Now().UnixNano(), 10) + "\n"
	if _, err := r.log.WriteString(line); err != nil {
		return fmt.Errorf("loss log: %w", err)
	}
	return nil
}

// model is parameters, and gradients that depend on them, the step and a rank's data.
type model struct {
	params, grads []float32
	seed          uint32
}

func (r *Rank) newModel(n, part int) *model {
	m := &model{params: make([]float32, n), grads: make([]float32, n), seed: uint32(part)*2654435761 + uint32(len(r.job.Name))}
	for i := range m.params {
		m.params[i] = float32(hash(m.seed+uint32(i))%1000)/1000 - 0.5
	}
	return m
}

func hash(x uint32) uint32 {
	x ^= x >> 16
	x *= 0x7feb352d
	x ^= x >> 15
	x *= 0x846ca68b
	return x ^ x>>16
}

// gradients are those of one rank's batch.
func (m *model) gradients(step, data int) {
	s := uint32(step)*40503 + uint32(data)*9176 + m.seed
	for i, p := range m.params {
		m.grads[i] = p - (float32(hash(s+uint32(i))%2000)/1000 - 1)
	}
}

// update takes the optimizer's step with gradients of n ranks.
func (m *model) update(grads []float32, from, n int) {
	for i, g := range grads {
		m.params[from+i] -= 0.05 * g / float32(n)
	}
}

// value is a number that all parameters have a part in.
func value(v []float32) float32 {
	var s float32
	for i, x := range v {
		s += x * x * float32(1+i%7)
	}
	return s / float32(len(v))
}
