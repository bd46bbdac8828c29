package zoo

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Order is what a conductor tells a rank: the content of its control file, which is
// replaced as a whole. The zero Order is a rank in order.
type Order struct {
	Factor float64 // of all its computing, 0 for 1
	Drift  float64 // added to the factor each step
	// Pauses of a length now and then: before one step of so many.
	Pause      time.Duration
	PauseEvery int
	// Bug is done once: skip (leave a collective out), swap (two communicators in the
	// wrong order) or mismatch (another operation than the others).
	Bug string
	// End ends the process at once: exit, panic, or stuck, which is to sleep forever
	// outside of any collective.
	End  string
	Code int // of exit
}

// Bugs that an Order can ask for.
const (
	BugSkip     = "skip"
	BugSwap     = "swap"
	BugMismatch = "mismatch"
)

// Ends that an Order can ask for.
const (
	EndExit  = "exit"
	EndPanic = "panic"
	EndStuck = "stuck"
)

// Give writes a rank's orders.
func Give(dir string, rank int, o Order) error {
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	path := orderFile(dir, rank)
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return fmt.Errorf("orders for rank %d: %w", rank, err)
	}
	return os.Rename(path+".new", path)
}

func orderFile(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("rank%d.order", rank))
}

// pollEvery is how often a rank looks for orders.
const pollEvery = 4 * time.Millisecond

// control follows a rank's control file.
type control struct {
	order atomic.Pointer[Order]
	bug   atomic.Pointer[string] // not yet done
}

func follow(dir string, rank int) *control {
	c := &control{}
	c.order.Store(&Order{})
	go c.watch(orderFile(dir, rank))
	return c
}

// watch ends the process where an order says so, in whatever call the rank is.
func (c *control) watch(path string) {
	var last time.Time
	for {
		time.Sleep(pollEvery)
		fi, err := os.Stat(path)
		if err != nil || fi.ModTime().Equal(last) {
			continue
		}
		last = fi.ModTime()
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		o := &Order{}
		if err := json.Unmarshal(b, o); err != nil {
			fmt.Fprintln(os.Stderr, "control file:", err)
			continue
		}
		switch o.End {
		case EndExit:
			os.Exit(o.Code)
		case EndPanic:
			panic("runtime error: index out of range [7] with length 7")
		}
		if o.Bug != "" {
			c.bug.Store(&o.Bug)
		}
		c.order.Store(o)
	}
}

// takeBug reports whether the rank has to do bug now, which it does once.
func (c *control) takeBug(bug string) bool {
	b := c.bug.Load()
	return b != nil && *b == bug && c.bug.CompareAndSwap(b, nil)
}

// Loss is one line of a rank's loss log.
type Loss struct {
	Step int
	Bits uint64
	At   int64 // Unix ns
}

// LossLog is where a rank writes its losses.
func LossLog(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("rank%d.loss", rank))
}

// ReadLosses reads a loss log from offset on, and returns where the next read begins: a
// last line that is not complete is left for then. There may be no log yet.
func ReadLosses(path string, offset int64) (losses []Loss, next int64, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, offset, nil
	}
	if err != nil {
		return nil, offset, err
	}
	defer f.Close()
	if _, err := f.Seek(offset, 0); err != nil {
		return nil, offset, err
	}
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return losses, offset, nil
		}
		offset += int64(len(line))
		l, err := parseLoss(line)
		if err != nil {
			return losses, offset, fmt.Errorf("%s: %w", path, err)
		}
		losses = append(losses, l)
	}
}

func parseLoss(line string) (Loss, error) {
	fields := strings.Fields(line)
	if len(fields) != 3 {
		return Loss{}, fmt.Errorf("%.64q is no step, loss and time", line)
	}
	step, err1 := strconv.Atoi(fields[0])
	bits, err2 := strconv.ParseUint(fields[1], 16, 64)
	at, err3 := strconv.ParseInt(fields[2], 10, 64)
	return Loss{step, bits, at}, errors.Join(err1, err2, err3)
}
