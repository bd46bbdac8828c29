package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/bench/zoo"
	"github.com/lockstep-ccl/lockstep/ccl"
)

// Launchers of a job.
const (
	launchRun   = "run"   // lockstep run: the first failure ends the others
	launchHold  = "hold"  // lockstep run --hold: they are left as they are
	launchPlain = "plain" // a shell's &: nobody watches
)

const (
	jobName    = "zoo"
	masterPort = "9401"
	webAddr    = "127.0.0.1:9402"
	meetPort   = "29400"
	runLife    = time.Minute // of a rank, beside the time that its fault may take
)

// cluster is one job, its agents and its master.
type cluster struct {
	lockstep, self string
	dir            string // everything below
	shm            string // flight recorders
	job            *zoo.Job
	habit          zoo.Habit
	launcher       string
	pods           bool // ranks have namespaces of their own
	spin           float64
	life           time.Duration

	wire   *wire
	hub    *port
	nodes  []*port
	ranks  []*port
	cg     *cgroups
	client *http.Client

	mu    sync.Mutex
	parts map[string]*part
}

// part is a child process.
type part struct {
	name string
	args []string
	env  []string
	at   *port
	cmd  *exec.Cmd
	done chan struct{}
}

func newCluster(c *cluster) (*cluster, error) {
	c.parts = map[string]*part{}
	for _, d := range []string{c.dir, c.shm, filepath.Join(c.dir, "job"), filepath.Join(c.dir, "run"), filepath.Join(c.dir, "master")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	for i := range c.job.Nodes {
		if err := os.MkdirAll(c.runtimeDir(i), 0o700); err != nil {
			return nil, err
		}
	}
	c.wire = newWire()
	err := func() (err error) {
		if c.hub, err = c.wire.add(-1); err != nil {
			return err
		}
		for i := range c.job.Nodes {
			p, err := c.wire.add(i)
			if err != nil {
				return err
			}
			c.nodes = append(c.nodes, p)
		}
		for r := range c.job.Ranks {
			p := c.nodes[c.job.Node(r)]
			if c.pods {
				if p, err = c.wire.add(c.job.Node(r)); err != nil {
					return err
				}
			}
			c.ranks = append(c.ranks, p)
		}
		return nil
	}()
	if err != nil {
		c.wire.stop()
		return nil, err
	}
	c.wire.start()
	c.client = &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			err = c.hub.within(func() error {
				var d net.Dialer
				conn, err = d.DialContext(ctx, network, addr)
				return err
			})
			return conn, err
		},
	}}
	return c, nil
}

func (c *cluster) runtimeDir(node int) string { return filepath.Join(c.shm, nodeName(node)) }

func nodeName(i int) string { return fmt.Sprintf("node%d", i) }

// start brings up master, agents and the job.
func (c *cluster) start(ctx context.Context) error {
	if err := c.startMaster(ctx); err != nil {
		return err
	}
	for i := range c.nodes {
		if err := c.startAgent(i); err != nil {
			return err
		}
	}
	return c.startJob()
}

func (c *cluster) startMaster(ctx context.Context) error {
	err := c.launch(&part{name: "master", at: c.hub, args: []string{c.lockstep, "master", "--job", jobName, "--listen", c.hub.addr.String() + ":" + masterPort, "--insecure-agents",
		"--web.listen-address", webAddr, "--state-dir", filepath.Join(c.dir, "master")}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		resp, err := c.get(ctx, "/-/ready")
		if err == nil {
			resp.Body.Close()
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the master did not become ready: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (c *cluster) startAgent(i int) error {
	return c.launch(&part{name: fmt.Sprintf("agent%d", i), at: c.nodes[i], args: []string{c.lockstep, "agent", "--node", nodeName(i),
		"--runtime-dir", c.runtimeDir(i), "--master", c.hub.addr.String() + ":" + masterPort, "--web.listen-address", "127.0.0.1:9400"}})
}

// place is what a rank has to know of where it is.
type place struct {
	Netns []string // by rank
	Meet  string   // host:port of rank 0
	Dir   string   // for pid files
}

func (c *cluster) startJob() error {
	pl := place{Meet: c.ranks[0].addr.String() + ":" + meetPort, Dir: filepath.Join(c.dir, "job")}
	for _, p := range c.ranks {
		pl.Netns = append(pl.Netns, p.path())
	}
	b, err := json.Marshal(pl)
	if err != nil {
		return err
	}
	file := filepath.Join(c.dir, "place.json")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		return err
	}
	env := []string{zoo.EnvDir + "=" + pl.Dir, zoo.EnvHabit + "=" + string(c.habit), zoo.EnvLife + "=" + c.life.String()}
	if c.spin > 0 {
		env = append(env, fmt.Sprintf("%s=%g", zoo.EnvSpin, c.spin))
	}
	rank := []string{c.self, "rank", file, c.job.Name}
	if c.launcher == launchPlain {
		return c.startPlain(env, rank, pl.Meet)
	}
	args := []string{c.lockstep, "run", "--job", jobName, "--ranks", fmt.Sprint(c.job.Ranks), "--nodes", fmt.Sprint(c.job.Nodes),
		"--dir", filepath.Join(c.dir, "run"), "--runtime-dir", c.shm, "--grace", "1s", "--quiet"}
	if c.launcher == launchHold {
		args = append(args, "--control", "--hold", "60s")
	}
	return c.launch(&part{name: "job", at: c.hub, env: env, args: append(append(args, "--"), rank...)})
}

// startPlain starts ranks as a loop of a shell would.
func (c *cluster) startPlain(env, rank []string, meet string) error {
	id, err := ccl.NewUniqueID(meet)
	if err != nil {
		return err
	}
	secret := filepath.Join(c.dir, "secret")
	b := make([]byte, 32)
	rand.Read(b)
	if err := os.WriteFile(secret, []byte(hex.EncodeToString(b)), 0o600); err != nil {
		return err
	}
	per := c.job.Ranks / c.job.Nodes
	for r := range c.job.Ranks {
		own := []string{fmt.Sprintf("RANK=%d", r), fmt.Sprintf("WORLD_SIZE=%d", c.job.Ranks), fmt.Sprintf("LOCAL_RANK=%d", r%per),
			fmt.Sprintf("LOCKSTEP_RANK=%d", r), "LOCKSTEP_JOB=" + jobName, "LOCKSTEP_COMM_ID=" + id.String(), "LOCKSTEP_SECRET_FILE=" + secret,
			"LOCKSTEP_NODE=" + nodeName(c.job.Node(r)), "LOCKSTEP_RUNTIME_DIR=" + c.runtimeDir(c.job.Node(r))}
		if err := c.launch(&part{name: fmt.Sprintf("rank%d", r), at: c.ranks[r], env: append(own, env...), args: rank}); err != nil {
			return err
		}
	}
	return nil
}

// launch starts a part in its namespace; its output is appended to NAME.log.
func (c *cluster) launch(p *part) error {
	f, err := os.OpenFile(filepath.Join(c.dir, p.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	cmd := exec.Command(c.self, append([]string{"enter", p.at.path()}, p.args...)...)
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	begun, done := make(chan error, 1), make(chan struct{})
	go func() {
		runtime.LockOSThread() // Pdeathsig means the thread that started the child
		defer f.Close()
		defer close(done)
		err := cmd.Start()
		if err == nil {
			started.Store(cmd.Process.Pid, true)
		}
		begun <- err
		if err == nil {
			_ = cmd.Wait()
			started.Delete(cmd.Process.Pid)
			fmt.Fprintf(f, "zoo: %s ended: %v\n", p.name, cmd.ProcessState)
		}
	}()
	if err := <-begun; err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	p.cmd, p.done = cmd, done
	c.mu.Lock()
	c.parts[p.name] = p
	c.mu.Unlock()
	return nil
}

func (c *cluster) part(name string) *part {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.parts[name]
}

// signal sends a part a signal.
func (c *cluster) signal(name string, sig syscall.Signal) error {
	p := c.part(name)
	if p == nil {
		return fmt.Errorf("no part is called %s", name)
	}
	return syscall.Kill(p.cmd.Process.Pid, sig)
}

// kill ends a part and waits for its end.
func (c *cluster) kill(name string) error {
	p := c.part(name)
	if p == nil {
		return fmt.Errorf("no part is called %s", name)
	}
	err := syscall.Kill(p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
	return err
}

// pid is a rank's process.
func (c *cluster) pid(rank int) (int, error) {
	b, err := os.ReadFile(pidFile(filepath.Join(c.dir, "job"), rank))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(b))
}

func pidFile(dir string, rank int) string { return filepath.Join(dir, fmt.Sprintf("rank%d.pid", rank)) }

// signalRank sends a rank a signal.
func (c *cluster) signalRank(rank int, sig syscall.Signal) error {
	pid, err := c.pid(rank)
	if err != nil {
		return err
	}
	return syscall.Kill(pid, sig)
}

// get asks the master.
func (c *cluster) get(ctx context.Context, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+webAddr+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.client.Do(req)
	if err == nil && resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		err = fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	return resp, err
}

func (c *cluster) status(ctx context.Context) ([]byte, error) {
	resp, err := c.get(ctx, "/api/v1/status")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, 8<<20))
}

// stop ends all processes. They are this program's descendants, also those whose parents
// have ended.
func (c *cluster) stop() {
	c.client.CloseIdleConnections()
	for r := range c.job.Ranks {
		if pid, err := c.pid(r); err == nil && c.launcher != launchPlain {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	}
	c.mu.Lock()
	parts := c.parts
	c.mu.Unlock()
	for _, p := range parts {
		_ = syscall.Kill(p.cmd.Process.Pid, syscall.SIGCONT)
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	}
	for _, p := range parts {
		<-p.done
	}
	reap(c.dir, 5*time.Second)
	c.cg.remove()
	c.wire.stop()
	_ = os.RemoveAll(c.shm)
}

// reap kills those of this program's adopted children (it is a subreaper) that belong to
// the run in dir, and waits for them.
func reap(dir string, limit time.Duration) {
	mark := []byte("\x00" + zoo.EnvDir + "=" + dir + "/")
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		files, _ := filepath.Glob("/proc/self/task/*/children")
		left := 0
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				continue
			}
			for _, s := range strings.Fields(string(b)) {
				pid, err := strconv.Atoi(s)
				if err != nil {
					continue
				}
				env, err := os.ReadFile("/proc/" + s + "/environ")
				zombie := err == nil && len(env) == 0
				if !zombie && !bytes.Contains(append([]byte{0}, env...), mark) {
					continue
				}
				var ws syscall.WaitStatus
				if !zombie {
					left++
					_ = syscall.Kill(pid, syscall.SIGKILL)
				} else if mine(pid) {
					continue // exec.Cmd waits for it
				}
				_, _ = syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
			}
		}
		if left == 0 {
			return
		}
	}
}

// started are the processes that exec.Cmd waits for.
var started sync.Map

func mine(pid int) bool { _, ok := started.Load(pid); return ok }

// enter becomes another program in a network namespace, at ordinary priority.
func enter(netns string, args []string) error {
	runtime.LockOSThread()
	f, err := os.Open(netns)
	if err != nil {
		return err
	}
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter %s: %w", netns, err)
	}
	f.Close()
	return become(args, os.Environ())
}

func become(args, env []string) error {
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, 0); err != nil {
		return err
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	return syscall.Exec(path, args, env)
}

// enterRank becomes a rank: in its namespace, where rank 0 can be found.
func enterRank(file string, args []string) error {
	runtime.LockOSThread()
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var pl place
	if err := json.Unmarshal(b, &pl); err != nil {
		return err
	}
	rank, err := strconv.Atoi(os.Getenv("LOCKSTEP_RANK"))
	if err != nil || rank < 0 || rank >= len(pl.Netns) {
		return fmt.Errorf("LOCKSTEP_RANK is %q", os.Getenv("LOCKSTEP_RANK"))
	}
	f, err := os.Open(pl.Netns[rank])
	if err != nil {
		return err
	}
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter %s: %w", pl.Netns[rank], err)
	}
	f.Close()
	// The launcher has rank 0 meet the others on its own loopback; here it is elsewhere.
	id := os.Getenv("LOCKSTEP_COMM_ID")
	head, tail := strings.Index(id, ":"), strings.LastIndex(id, ":")
	if head < 0 || head == tail {
		return fmt.Errorf("LOCKSTEP_COMM_ID is %q", id)
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "LOCKSTEP_COMM_ID=") })
	env = append(env, "LOCKSTEP_COMM_ID="+id[:head+1]+pl.Meet+id[tail:])
	if err := os.WriteFile(pidFile(pl.Dir, rank), []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		return err
	}
	return become(args, env)
}
