package torchdemo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/presence"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/nccl/torch"
	"github.com/lockstep-ccl/lockstep/record"
)

// job is torchrun under lockstep attach.
type job struct {
	cmd  *exec.Cmd
	dir  string
	done chan struct{}
	err  error // once done is closed

	group  sync.Mutex
	reaped bool

	mu   sync.Mutex
	said []string // the last lines
}

const (
	name    = "demo-torch" // of the job
	maxSaid = 40
	// lastStep is how long a job trains that is to come to its end.
	lastStep = 800
)

// start starts the job. exe is this program.
func start(exe string, m machine, f fault, ranks int, dir string) (*job, error) {
	program := filepath.Join(dir, "program")
	if err := os.CopyFS(program, torch.Job); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("write the training program: %w", err)
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	j := &job{dir: dir, done: make(chan struct{})}
	args := []string{"attach", "--job", name, "--runtime-dir", filepath.Join(dir, "run"), "--state-dir", filepath.Join(dir, "state"), "--agent-web", "127.0.0.1:0", "--master-web", "127.0.0.1:0", "--",
		m.python, "-B", "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", fmt.Sprint(ranks), "--max_restarts", restarts(f),
		"--rdzv_backend", "c10d", "--rdzv_endpoint", fmt.Sprint("127.0.0.1:", port), "--rdzv_id", "demo", filepath.Join(program, torch.Script)}
	j.cmd = exec.Command(exe, args...)
	j.cmd.Dir = dir
	// Attempts of torchrun share a store otherwise, in which a rank may find the former attempt's NCCL id
	// (pytorch/pytorch#135712).
	j.cmd.Env = append(os.Environ(), "FAULT="+f.env, "FAULT_RANK="+fmt.Sprint(victim), "PROGRESS="+filepath.Join(dir, "progress"), "PYTHONUNBUFFERED=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
	if os.Getenv("NCCL_NVLS_ENABLE") == "" {
		j.cmd.Env = append(j.cmd.Env, "NCCL_NVLS_ENABLE=0") // multicast is not allowed everywhere
	}
	if f.env == "restart" || f.env == "no_restart" {
		j.cmd.Env = append(j.cmd.Env, fmt.Sprint("LAST_STEP=", lastStep), "WIDTH=512")
	}
	j.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	j.cmd.Stdout, j.cmd.Stderr = in, in
	if err := j.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start lockstep attach: %w", err), in.Close(), out.Close())
	}
	in.Close()
	go j.listen(out)
	go j.await()
	return j, nil
}

// await waits for the job to end, kills what it has left of its group, and reaps it: in this order,
// because from then on its pid, the name of the group, can be a stranger's.
func (j *job) await() {
	for errors.Is(unix.Waitid(unix.P_PID, j.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	j.group.Lock()
	_ = syscall.Kill(-j.cmd.Process.Pid, syscall.SIGKILL)
	j.err = j.cmd.Wait()
	j.reaped = true
	j.group.Unlock()
	close(j.done)
}

// signal reaches the job's process group, while that is its own.
func (j *job) signal(sig syscall.Signal) {
	j.group.Lock()
	defer j.group.Unlock()
	if !j.reaped {
		_ = syscall.Kill(-j.cmd.Process.Pid, sig)
	}
}

func restarts(f fault) string {
	if f.env == "restart" {
		return "1"
	}
	return "0"
}

// listen keeps the job's last lines. It ends when all that have the pipe have ended.
func (j *job) listen(out io.ReadCloser) {
	defer out.Close()
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		j.mu.Lock()
		if j.said = append(j.said, lines.Text()); len(j.said) > maxSaid {
			j.said = j.said[1:]
		}
		j.mu.Unlock()
	}
	_, _ = io.Copy(io.Discard, out) // a line that is too long: the job must not wait for us
}

// page is the address of the job's master, "" while there is none.
func (j *job) page() string {
	there, ok := presence.Find(filepath.Join(j.dir, "run"), presence.Master(name))
	if !ok || there.Web == "" {
		return ""
	}
	return "http://" + there.Web
}

// failed says why the job does not do what it should, with its own last words.
func (j *job) failed(what string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return fmt.Errorf("%s; the job said last:\n  %s", what, strings.Join(j.said, "\n  "))
}

// status asks the job's master.
func (j *job) status(ctx context.Context) (*web.Status, error) {
	at := j.page()
	if at == "" {
		return nil, errors.New("there is no master yet")
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at+"/api/v1/status", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", at, resp.Status)
	}
	var st web.Status
	err = json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&st)
	return &st, err
}

// pid is the process of a rank, by its recorder; the youngest attempt's.
func (j *job) pid(rank int32) int {
	dir, _, err := record.DirBelow(filepath.Join(j.dir, "run"), "")
	if err != nil {
		return 0
	}
	paths, _ := record.List(dir)
	pid, attempt := 0, int64(-1)
	for _, path := range paths {
		r, err := record.Open(path)
		if err != nil {
			continue // it is being made, or is gone
		}
		if h := r.Header(); h.Rank == rank && int64(h.Attempt) > attempt && r.Alive() {
			pid, attempt = int(h.PID), int64(h.Attempt)
		}
		r.Close()
	}
	return pid
}

// losses are what the ranks of a job that came to its end have written, "" when they have not.
func (j *job) losses(ranks int) string {
	var all []string
	for r := range ranks {
		b, err := os.ReadFile(filepath.Join(j.dir, fmt.Sprintf("progress.%d.loss", r)))
		if err != nil {
			return ""
		}
		all = append(all, strings.TrimSpace(string(b)))
	}
	return strings.Join(all, " ")
}

// stop ends the job and all that torchrun has started.
func (j *job) stop(ranks int) {
	for r := range ranks {
		if pid := j.pid(int32(r)); pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	}
	j.signal(syscall.SIGTERM)
	select {
	case <-j.done:
	case <-time.After(10 * time.Second):
	}
	for r := range ranks {
		if pid := j.pid(int32(r)); pid > 0 { // torchrun starts them in sessions of their own
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	j.signal(syscall.SIGKILL)
	<-j.done
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("a port for torchrun's rendezvous: %w", err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
