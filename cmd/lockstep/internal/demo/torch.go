package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/torchjob"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/internal/ports"
)

// torchSite is a PyTorch job of this machine: torchrun, under lockstep attach, has the ranks. It begins anew when the
// remediator has had the agent end them. It is site and program.
type torchSite struct {
	*cluster
	machine torchjob.Machine
	sockets bool // NCCL goes over sockets, which can be throttled
	ports   *ports.Held
}

const (
	faultSkipped = "collective_skipped"
	faultSwapped = "collectives_swapped"
	torchAlone   = names.ClassCommunicationSlow // is played by name only: all of its job goes over sockets

	torchRestarts   = 1000
	torchCheckpoint = 50       // steps
	torchPaced      = 25 << 20 // bytes/s of a socket that carries GB/s
	torchEnds       = 8 * time.Second
)

// torchFaults are those that PyTorch ranks can have in turn.
func torchFaults() []string {
	return []string{faultStopped, faultKilled, names.ClassNoncommunicationHang, faultSkipped, faultSwapped, names.ClassNoncommunicationSlow, faultSlowGPU}
}

// onTorch makes it a PyTorch job's, or says what this machine lacks for one.
func (c *Cmd) onTorch(ctx context.Context, cl *cluster) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	m, err := torchjob.Look(ctx, exe, os.Getenv("LOCKSTEP_NCCL_PLUGIN"))
	if err != nil {
		return err
	}
	cl.shape = shape{dp: min(m.GPUs, 8), tp: 1, pp: 1, nodes: 1, agents: 1}
	t := &torchSite{cluster: cl, machine: m, sockets: c.Fault == torchAlone}
	cl.site, cl.program = t, t
	return c.fits(cl.shape)
}

func (t *torchSite) ranks() string {
	over := ""
	if t.sockets {
		over = " (sockets)"
	}
	return fmt.Sprintf("%d ranks of PyTorch %s over NCCL %s%s", t.shape.world(), t.machine.Torch, t.machine.NCCL, over)
}

func (t *torchSite) where() string {
	return "this machine's GPUs, started by torchrun under lockstep attach"
}

func (t *torchSite) check(context.Context) error { return nil }

func (t *torchSite) plan() []string { return nil }

// prepare finds ports for torchrun's store and for NCCL's RAS.
func (t *torchSite) prepare(context.Context) (host string, err error) {
	t.ports, err = ports.Hold("127.0.0.1", 2)
	return "127.0.0.1", err
}

func (t *torchSite) actuator() []string { return []string{"--elastic", t.job} }

// traits: torchrun has no spares, and NCCL's RAS is asked.
func (t *torchSite) traits() traits {
	return traits{here: true, agent: []string{"--ras.addr", t.rasAddr()}}
}

func (t *torchSite) rasAddr() string { return t.ports.Addrs[1] }

// training is the job as torchrun is to run it.
func (t *torchSite) training(dir string) torchjob.Job {
	return torchjob.Job{Machine: t.machine, Ranks: t.shape.world(), Dir: dir, Rendezvous: t.ports.Addrs[0], Sockets: t.sockets}
}

func (t *torchSite) submit(_ context.Context, c *cluster, _ certs) error {
	j := t.training(filepath.Join(c.dir, "train"))
	j.Restarts, j.Faults, j.Pace, j.Checkpoint = torchRestarts, filepath.Join(c.dir, "faults"), c.pace, torchCheckpoint
	command, err := j.Command()
	if err != nil {
		return err
	}
	args := append([]string{"attach", "--agent", "never", "--job", c.job, "--runtime-dir", c.runtimeRoot(), "--"}, command...)
	// What the remediator asks for is done to jobs that allow it.
	env := append(j.Environ(), "LOCKSTEP_FENCE=stop", "LOCKSTEP_FENCE_GRACE=500ms", "NCCL_RAS_ADDR="+t.rasAddr())
	return c.launch(&part{name: "job", args: args, env: env})
}

func (t *torchSite) exec(context.Context, string, ...string) error {
	return errors.New("PyTorch ranks are on this machine")
}

func (t *torchSite) nodes(context.Context) ([]string, error) { return []string{t.nodeName(0)}, nil }

func (t *torchSite) canLose(context.Context, string) error {
	return errors.New("this machine is not to lose its power")
}

// remove ends torchrun and what it has started, which is in sessions of its own.
func (t *torchSite) remove() {
	t.signal(syscall.SIGCONT) // one that is stopped hears nothing
	t.end("job")
	for deadline := time.Now().Add(torchEnds); t.signal(syscall.SIGKILL) > 0 && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	_ = t.ports.Close()
}

// signal reaches each process that has this job's runtime directory in its environment, and returns how many they are.
func (t *torchSite) signal(sig syscall.Signal) (n int) {
	mark := []byte("\x00LOCKSTEP_RUNTIME_DIR=" + t.runtimeRoot() + "\x00")
	dirs, _ := os.ReadDir("/proc")
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		p, err := os.FindProcess(pid) // a handle first: the signal must not reach the pid's next owner
		if err != nil {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", d.Name(), "environ"))
		if err == nil && bytes.Contains(append([]byte{0}, env...), mark) && p.Signal(sig) == nil {
			n++
		}
		_ = p.Release()
	}
	return n
}

func (t *torchSite) choose(name string, rank int, r *rand.Rand) (fault, error) {
	world := t.shape.world()
	if rank < 0 {
		rank = r.IntN(world)
	}
	f := fault{Name: name, Class: names.ClassNoncommunicationHang, Rank: rank, Peer: -1}
	switch name {
	case faultStopped, faultKilled, names.ClassNoncommunicationHang, names.ClassNoncommunicationSlow:
		f, err := choose(name, rank, t.shape, r)
		f.Again = name == faultKilled
		return f, err
	case faultSkipped:
		f.Text = fmt.Sprintf("rank %d leaves an AllReduce out", rank)
	case faultSwapped:
		f.Text = fmt.Sprintf("rank %d calls two communicators in the opposite order", rank)
	case faultSlowGPU:
		f.Class, f.Text = names.ClassNoncommunicationSlow, fmt.Sprintf("rank %d's GPU has other work", rank)
		return f, nil
	case torchAlone:
		f.Class, f.Text, f.Peer = name, fmt.Sprintf("what rank %d sends is throttled to %d MB/s a connection", rank, torchPaced>>20), (rank+1)%world
		for peer := range world { // who is next in the ring is NCCL's to know
			if peer != rank {
				f.Or = append(f.Or, fmt.Sprintf("rank %d → rank %d", rank, peer))
			}
		}
		return f, nil
	default:
		return fault{}, fmt.Errorf("unknown fault %q", name)
	}
	if world == 2 { // of two that differ nobody can tell which is wrong
		f.Or = []string{"rank 0, rank 1", "rank 1, rank 0", fmt.Sprintf("rank %d", 1-rank)}
	}
	return f, nil
}

func (t *torchSite) inject(f *fault, attempt, pid int) error {
	dir := filepath.Join(t.dir, "faults")
	switch f.Name {
	case faultSkipped:
		return torchjob.Order(dir, torchjob.Skip, f.Rank, attempt)
	case faultSwapped:
		return torchjob.Order(dir, torchjob.Swap, f.Rank, attempt)
	case faultSlowGPU:
		return torchjob.Order(dir, torchjob.BusyGPU, f.Rank, attempt)
	case torchAlone:
		_, err := torchjob.Throttle(pid, torchPaced)
		return err
	}
	return f.inject(dir, attempt, pid)
}

// step is how many losses there are. A new attempt leaves out those after its checkpoint before its first collective.
func (t *torchSite) step(st *web.Status) uint64 {
	begun := false
	for _, c := range st.Communicators {
		begun = begun || c.Least > 0
	}
	losses, err := t.losses()
	if !begun || err != nil {
		return 0
	}
	return uint64(len(losses))
}

func (t *torchSite) undisturbed(ctx context.Context, _ shape, dir string, steps int) error {
	held, err := ports.Hold("127.0.0.1", 2)
	if err != nil {
		return err
	}
	defer held.Close()
	t.ports = held
	j := t.training(dir)
	j.Steps = steps
	command, err := j.Command()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), append(j.Environ(), "LOCKSTEP_RUNTIME_DIR="+t.runtimeRoot(), "NCCL_RAS_ADDR="+t.rasAddr())...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = torchEnds
	defer t.signal(syscall.SIGKILL)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("undisturbed run: %w\n%s", err, log.Bytes())
	}
	if _, err := os.Stat(filepath.Join(dir, train.LossLog)); err != nil {
		return fmt.Errorf("undisturbed run: %w\n%s", err, log.Bytes())
	}
	return nil
}
