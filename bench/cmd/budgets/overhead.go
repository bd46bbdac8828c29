package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// rankEnv makes this program one of the ranks that recorderOverhead starts.
const rankEnv = "LOCKSTEP_BENCH_RANK"

var overheadSizes = []int{8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20}

const (
	overheadRanks = 2
	launches      = 5
	pairs         = 41 // blocks of either kind at each size, of one launch
	pairedBlock   = 4 * time.Millisecond
)

// recorderOverhead times the same AllReduce on two communicators of the same
// two processes, one with a recorder and one without, in short blocks that
// alternate: what else the machine does hits both, and the median over pairs of
// blocks is little moved by what hits one. Where the communicators' memory
// happens to lie favours one of them, so that is done anew a few times.
func recorderOverhead() ([]row, error) {
	var off, more [][]float64 // by size, then by launch
	for range launches {
		results, err := launchOverhead()
		if err != nil {
			return nil, err
		}
		if len(results) != len(overheadSizes) {
			return nil, fmt.Errorf("rank 0 measured %d sizes of %d", len(results), len(overheadSizes))
		}
		if off == nil {
			off, more = make([][]float64, len(results)), make([][]float64, len(results))
		}
		for i, r := range results {
			off[i], more[i] = append(off[i], r.off), append(more[i], r.more)
		}
	}
	var rows []row
	for i, size := range overheadSizes {
		// 1 %, or 100 ns where an operation is so short that 1 % is less.
		rows = append(rows, row{
			fmt.Sprintf("recorder_overhead_%d_bytes", size), middle(more[i]), "ns", max(100, middle(off[i])/100),
		})
	}
	return rows, nil
}

func middle(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// overhead is one size's nanoseconds without a recorder, and how many more with it.
type overhead struct{ off, more float64 }

// launchOverhead runs the ranks once and returns what rank 0 measured.
func launchOverhead() ([]overhead, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp(sharedMemory(), "budgets-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return nil, err
	}
	secretFile := filepath.Join(dir, "secret")
	if err := os.WriteFile(secretFile, []byte(hex.EncodeToString(secret)), 0o600); err != nil {
		return nil, err
	}
	env := append(os.Environ(), "LOCKSTEP_SECRET_FILE="+secretFile, "LOCKSTEP_RUNTIME_DIR="+dir, "LOCKSTEP_NODE=local")
	for _, name := range []string{"OFF", "ON"} {
		id, err := ccl.NewUniqueID(freeAddr())
		if err != nil {
			return nil, err
		}
		env = append(env, "LOCKSTEP_BENCH_ID_"+name+"="+id.String())
	}

	var printed bytes.Buffer
	var ranks [overheadRanks]*exec.Cmd
	for r := range ranks {
		cmd := exec.CommandContext(ctx, "/proc/self/exe")
		cmd.Env = append(slices.Clone(env), rankEnv+"="+strconv.Itoa(r))
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		cmd.Stderr = os.Stderr
		if r == 0 {
			cmd.Stdout = &printed
		}
		if err := startOn(cmd, r); err != nil {
			cancel()
			return nil, err
		}
		ranks[r] = cmd
	}
	for r, cmd := range ranks {
		if err := cmd.Wait(); err != nil {
			cancel() // the others end with it
			return nil, fmt.Errorf("rank %d: %w", r, err)
		}
	}
	var results []overhead
	for lines := bufio.NewScanner(&printed); lines.Scan(); {
		var r overhead
		if _, err := fmt.Sscan(lines.Text(), &r.off, &r.more); err != nil {
			return nil, fmt.Errorf("rank 0 printed %q: %w", lines.Text(), err)
		}
		results = append(results, r)
	}
	return results, nil
}

// startOn starts cmd on one processor, where there are enough: its first thread
// has the affinity of the one that starts it.
func startOn(cmd *exec.Cmd, cpu int) error {
	var mine, one unix.CPUSet
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		return err
	}
	for i, n := 0, 0; i < 8*len(mine); i++ {
		if mine.IsSet(i) {
			if n == cpu {
				one.Set(i)
			}
			n++
		}
	}
	if one.Count() == 1 {
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return err
		}
		defer unix.SchedSetaffinity(0, &mine)
	}
	return cmd.Start()
}

// rank is one rank of recorderOverhead. Rank 0 prints a line a size: the median
// nanoseconds of the operation without recorder, and the median of what it
// takes more with it.
func rank(ctx context.Context, me int) error {
	rec, err := record.Create(record.Options{Identity: record.Identity{
		Job: benchJob, Node: "local", Rank: int32(me), WorldSize: overheadRanks, LocalRank: int32(me),
	}})
	if err != nil {
		return err
	}
	defer rec.Close()
	join := func(id string, rec *record.Writer) (*ccl.Comm, error) {
		uid, err := ccl.ParseUniqueID(os.Getenv(id))
		if err != nil {
			return nil, err
		}
		return ccl.Init(ctx, ccl.Config{ID: uid, Rank: me, Size: overheadRanks, Recorder: rec})
	}
	off, err := join("LOCKSTEP_BENCH_ID_OFF", nil)
	if err != nil {
		return err
	}
	defer off.Close()
	on, err := join("LOCKSTEP_BENCH_ID_ON", rec)
	if err != nil {
		return err
	}
	defer on.Close()

	for _, size := range overheadSizes {
		send, recv := make([]float32, size/4), make([]float32, size/4)
		s := off.NewStream()
		block := func(c *ccl.Comm, n int) (float64, error) {
			if err := c.Barrier(s); err != nil {
				return 0, err
			}
			if err := s.Wait(ctx); err != nil {
				return 0, err
			}
			start := time.Now()
			for range n {
				if err := c.AllReduce(s, ccl.Of(send), ccl.Of(recv), ccl.Sum); err != nil {
					return 0, err
				}
				if err := s.Wait(ctx); err != nil {
					return 0, err
				}
			}
			return float64(time.Since(start).Nanoseconds()) / float64(n), nil
		}
		n, err := blockLength(ctx, off, s, block)
		if err != nil {
			return err
		}
		if _, err := block(on, n); err != nil { // connects
			return err
		}
		var base, more []float64
		for i := range pairs {
			first, second := off, on
			if i%2 == 1 {
				first, second = on, off
			}
			a, err := block(first, n)
			if err != nil {
				return err
			}
			b, err := block(second, n)
			if err != nil {
				return err
			}
			if i%2 == 1 {
				a, b = b, a
			}
			base, more = append(base, a), append(more, b-a)
		}
		if me == 0 {
			fmt.Println(middle(base), middle(more))
		}
	}
	return nil
}

// blockLength returns how many operations make a block, the same on all ranks.
func blockLength(ctx context.Context, c *ccl.Comm, s *ccl.Stream, block func(*ccl.Comm, int) (float64, error)) (int, error) {
	if _, err := block(c, 2); err != nil { // connects
		return 0, err
	}
	ns, err := block(c, 4)
	if err != nil {
		return 0, err
	}
	mine := []float64{ns}
	all := make([]float64, 1)
	if err := c.AllReduce(s, ccl.Of(mine), ccl.Of(all), ccl.Max); err != nil {
		return 0, err
	}
	if err := s.Wait(ctx); err != nil {
		return 0, err
	}
	return max(2, int(float64(pairedBlock)/all[0])), nil
}
