package demo

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/internal/ports"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// jobName is what the job is called where nobody else's can be.
const jobName = "demo"

// shape is the job's parallel layout, on how many logical nodes it is, and how many agents of
// them are on this machine.
type shape struct{ dp, tp, pp, nodes, agents int }

func (s shape) world() int { return s.dp * s.tp * s.pp }

// cluster is everything that runs, each part a process of its own.
type cluster struct {
	dir     string // everything below, 0700
	job     string // its name
	site    site   // where the ranks run; nil: on this machine, under lockstep run
	program program
	self    string // this program
	shape   shape
	pace    time.Duration
	token   string
	// device of the ranks, cpu or cuda; monitored: with a real Prometheus and Alertmanager.
	device    string
	monitored bool
	powerOff  string        // command that takes a node's power away
	shrink    bool          // survivors of a lost rank go on by themselves
	openWeb   bool          // pages without TLS and password
	interval  time.Duration // between looks at the metrics

	mu    sync.Mutex
	parts map[string]*part

	stack      *local.Stack // nil unless monitored
	traced     bool         // with a real Jaeger
	tracing    *local.Tracing
	herald     *herald    // nil if monitored
	web        *local.Web // nil if openWeb
	client     *http.Client
	control    *process.Client
	held       []*ports.Held
	masterGRPC string   // on a site: where its agents reach the master
	agents     []string // host:port of /metrics
	master     string
	remediator string
	died       chan error
}

// part is one child process that can be killed and started again.
type part struct {
	name string
	args []string
	env  []string
	cmd  *exec.Cmd
	done chan struct{}
	stop bool // its end is wanted
}

// newCluster lays out the directory and picks ports; nothing runs yet.
func newCluster(c *cluster) (*cluster, error) {
	var err error
	if c.self, err = os.Executable(); err != nil {
		return nil, err
	}
	c.parts, c.died, c.interval = map[string]*part{}, make(chan error, 16), 250*time.Millisecond
	c.client = &http.Client{Transport: &http.Transport{}}
	if c.program == nil {
		c.program = ownProgram{c}
	}
	dir := c.dir
	for _, d := range []string{"log", "faults", "train", "master", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, err
		}
	}
	if c.token, err = secret(filepath.Join(dir, "token")); err != nil {
		return nil, err
	}
	_, err = secret(filepath.Join(dir, "operator-token"))
	return c, err
}

// secret makes a token's file.
func secret(file string) (string, error) {
	b := make([]byte, 32)
	rand.Read(b)
	token := hex.EncodeToString(b)
	return token, os.WriteFile(file, []byte(token+"\n"), 0o600)
}

// start brings everything up, the job last.
func (c *cluster) start(ctx context.Context, progress io.Writer) error {
	masterGRPC, err := c.hold(ctx)
	if err != nil {
		return err
	}

	certs, err := newCerts(filepath.Join(c.dir, "pki"))
	if err != nil {
		return err
	}
	if !c.openWeb {
		if err := c.closeWeb(certs); err != nil {
			return err
		}
	}
	if c.monitored {
		if err := c.monitor(ctx, progress); err != nil {
			return err
		}
	}
	if c.traced {
		if err := c.trace(ctx, progress); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(c.dir, "remediator.yaml"), []byte(c.policy()), 0o600); err != nil {
		return err
	}
	parts, err := c.daemons(certs, masterGRPC)
	if err != nil {
		return err
	}
	if c.site == nil {
		parts = append(parts, c.supervisor())
	}
	for _, p := range parts {
		p.env = append(p.env, c.traceEnv(p.name)...)
		if err := c.launch(p); err != nil {
			return err
		}
		if err := c.ready(ctx, p.name); err != nil {
			return err
		}
	}
	if c.site != nil {
		if err := c.site.submit(ctx, c, certs); err != nil {
			return err
		}
	} else {
		c.control = process.NewClient(filepath.Join(c.dir, "run", "control.sock"))
	}
	if !c.monitored {
		c.herald = startHerald(c)
	}
	return nil
}

// daemons are master, remediator and agents, each with a certificate of its own.
func (c *cluster) daemons(certs certs, masterGRPC string) ([]*part, error) {
	masterHost, _, err := net.SplitHostPort(masterGRPC)
	if err != nil {
		return nil, err
	}
	masterTLS, err := certs.flags("master", wire.Identity{Role: wire.RoleMaster, Jobs: []string{c.job}}, masterHost)
	if err != nil {
		return nil, err
	}
	remediatorTLS, err := certs.flags("remediator", wire.Identity{Role: wire.RoleRemediator})
	if err != nil {
		return nil, err
	}
	parts := []*part{
		{name: "master", args: append([]string{"master", "--job", c.job, "--listen", masterGRPC, "--state-dir", filepath.Join(c.dir, "master")}, slices.Concat(masterTLS, c.webFlags(c.master, webPassword))...)},
		{name: "remediator", args: append([]string{"remediator", "--master", masterGRPC, "--config.file", filepath.Join(c.dir, "remediator.yaml"), "--journal", filepath.Join(c.dir, "journal.db"),
			"--token-file", filepath.Join(c.dir, "token"), "--operator-token-file", filepath.Join(c.dir, "operator-token")}, slices.Concat(c.actuator(), remediatorTLS, c.webFlags(c.remediator, webMutual))...)},
	}
	if c.tracing != nil {
		parts[0].args = append(parts[0].args, "--web.trace-url", c.tracing.TracePage("{trace}"))
	}
	for i, addr := range c.agents {
		agentTLS, err := certs.flags(fmt.Sprintf("agent%d", i), wire.Identity{Role: wire.RoleAgent, Node: c.nodeName(i)})
		if err != nil {
			return nil, err
		}
		args := slices.Concat([]string{"agent", "--node", c.nodeName(i), "--runtime-dir", c.runtimeDir(i), "--master", masterGRPC}, agentTLS, c.webFlags(addr, webPassword), c.traits().agent)
		parts = append(parts, &part{name: fmt.Sprintf("agent%d", i), args: args})
	}
	return parts, nil
}

// supervisor of the ranks, where they are on this machine.
func (c *cluster) supervisor() *part {
	return &part{name: "job", env: []string{"LOCKSTEP_FAULT_DIR=" + filepath.Join(c.dir, "faults")}, args: append([]string{"run", "--job", c.job, "--ranks", fmt.Sprint(c.shape.world()),
		"--spares", "1", "--nodes", fmt.Sprint(c.shape.nodes), "--dir", filepath.Join(c.dir, "run"), "--runtime-dir", c.runtimeRoot(), "--control", "--hold", c.holdFor(), "--grace", "500ms", "--quiet", "--"},
		c.trainCommand(c.shape, filepath.Join(c.dir, "train"), 0, c.pace)...)}
}

// monitor starts Prometheus and Alertmanager.
func (c *cluster) monitor(ctx context.Context, progress io.Writer) (err error) {
	rulesFile := filepath.Join(c.dir, "lockstep.rules.yaml")
	if err := writeRules(rulesFile); err != nil {
		return err
	}
	targets := []local.Target{
		{Job: "lockstep-master", Addresses: []string{c.master}},
		{Job: "lockstep-remediator", Addresses: []string{c.remediator}},
	}
	if len(c.agents) > 0 {
		targets = append(targets, local.Target{Job: "lockstep-agent", Addresses: c.agents})
	}
	c.stack, err = local.Start(ctx, local.Config{
		Dir:                    filepath.Join(c.dir, "monitoring"),
		Targets:                targets,
		RuleFiles:              []string{rulesFile},
		Web:                    c.web,
		WebhookURL:             c.web.URL(c.remediator) + "/webhook",
		WebhookCredentialsFile: filepath.Join(c.dir, "token"),
		Interval:               c.interval,
		Progress:               progress,
	})
	return err
}

// trainCommand is a rank's command line.
func (c *cluster) trainCommand(s shape, dir string, steps int, pace time.Duration) []string {
	args := []string{c.self, "train", "--dp", fmt.Sprint(s.dp), "--tp", fmt.Sprint(s.tp), "--pp", fmt.Sprint(s.pp),
		"--dir", dir, "--steps", fmt.Sprint(steps), "--checkpoint", "20", "--pace", pace.String(), "--device", c.device}
	if c.shrink {
		args = append(args, "--on-failure", "shrink")
	}
	return args
}

func (c ownProgram) undisturbed(ctx context.Context, s shape, dir string, steps int) error {
	args := append([]string{"run", "--job", "reference", "--ranks", fmt.Sprint(s.world()), "--dir", filepath.Join(dir, "run"),
		"--runtime-dir", c.runtimeRoot(), "--quiet", "--"}, c.trainCommand(s, dir, steps, 0)...)
	cmd := exec.CommandContext(ctx, c.self, args...)
	defer os.RemoveAll(c.runtimeRoot())
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("undisturbed run: %w\n%s", err, log.Bytes())
	}
	return nil
}

// holdFor is how long the survivors of a failure are left as they are.
func (c *cluster) holdFor() string {
	if c.shrink {
		return "24h"
	}
	return "30s"
}

// Flight recorders live on shared memory, apart from other jobs' of this machine: other demos'
// directories may have the same last name.
func (c *cluster) runtimeRoot() string {
	path, err := filepath.Abs(c.dir)
	if err != nil {
		path = c.dir
	}
	of := sha256.Sum256([]byte(path))
	return filepath.Join("/dev/shm", fmt.Sprintf("lockstep-%s-%x", filepath.Base(path), of[:4]))
}

func (c *cluster) runtimeDir(i int) string {
	if c.shape.nodes == 1 {
		return c.runtimeRoot()
	}
	return filepath.Join(c.runtimeRoot(), c.nodeName(i))
}

// nodeName is what the supervisor calls a node: by the host when there is one.
func (c *cluster) nodeName(i int) string {
	if host, err := os.Hostname(); c.shape.nodes == 1 && err == nil {
		return host
	}
	return fmt.Sprintf("node%d", i)
}

// launch starts a part; its output goes to log/NAME.log.
func (c *cluster) launch(p *part) error {
	f, err := os.OpenFile(filepath.Join(c.dir, "log", p.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	cmd := exec.Command(c.self, p.args...)
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started, done := make(chan error, 1), make(chan struct{})
	go func() {
		runtime.LockOSThread() // Pdeathsig means the thread that started the child
		defer f.Close()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		err = cmd.Wait()
		c.mu.Lock()
		wanted := p.stop
		c.mu.Unlock()
		close(done)
		if !wanted {
			select {
			case c.died <- fmt.Errorf("%s ended by itself: %w\n%s", p.name, errOr(err, "exit status 0"), tail(f.Name())):
			default:
			}
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	c.mu.Lock()
	p.cmd, p.done, p.stop = cmd, done, false
	c.parts[p.name] = p
	c.mu.Unlock()
	return nil
}

// ready waits until a part answers.
func (c *cluster) ready(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	check := func() error { return c.get(ctx, c.web.URL(c.address(name))+"/-/ready", nil) }
	if name == "job" {
		check = func() error {
			_, err := process.NewClient(filepath.Join(c.dir, "run", "control.sock")).Status(ctx)
			return err
		}
	}
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not become ready: %w\n%s", name, err, tail(filepath.Join(c.dir, "log", name+".log")))
		case err := <-c.died:
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (c *cluster) address(name string) string {
	switch name {
	case "master":
		return c.master
	case "remediator":
		return c.remediator
	case "agent0", "agent1":
		return c.agents[name[5]-'0']
	}
	return ""
}

// kill ends a part with SIGKILL, as a crash would; restart starts it again.
func (c *cluster) kill(name string) error {
	if c.monitored && (name == local.Prometheus || name == local.Alertmanager) {
		return c.stack.Kill(name)
	}
	c.mu.Lock()
	p := c.parts[name]
	if p != nil {
		p.stop = true
	}
	c.mu.Unlock()
	if p == nil {
		return fmt.Errorf("no part is called %s", name)
	}
	err := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
	return err
}

func (c *cluster) restart(ctx context.Context, name string) error {
	if c.monitored && (name == local.Prometheus || name == local.Alertmanager) {
		return c.stack.Restart(ctx, name)
	}
	c.mu.Lock()
	p := c.parts[name]
	c.mu.Unlock()
	if err := c.launch(p); err != nil {
		return err
	}
	return c.ready(ctx, name)
}

// stop ends everything, the job first.
func (c *cluster) stop() {
	if c.herald != nil {
		c.herald.stop()
	}
	if c.site != nil {
		c.end("remediator") // which might take one more node out meanwhile
		c.site.remove()
	}
	for _, name := range []string{"job", "agent0", "agent1", "remediator", "master"} {
		c.end(name)
	}
	if c.stack != nil {
		c.stack.Stop()
	}
	if c.tracing != nil {
		c.tracing.Stop()
	}
	for _, h := range c.held {
		_ = h.Close()
	}
	_ = os.RemoveAll(c.runtimeRoot())
}

// end asks a part to end, and makes it; one that has ended already is left alone.
func (c *cluster) end(name string) {
	c.mu.Lock()
	p := c.parts[name]
	if p != nil {
		p.stop = true
	}
	c.mu.Unlock()
	if p == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // not to its number, which another process may have by now
	select {
	case <-p.done:
	case <-time.After(8 * time.Second):
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.done
	}
}

// get reads JSON from a URL into v (nil: only the status counts).
func (c *cluster) get(ctx context.Context, url string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if req.URL.Host == c.remediator { // the token is of nobody else's business
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	if v == nil {
		return nil
	}
	return json.NewDecoder(io.LimitReader(resp.Body, 8<<20)).Decode(v)
}

// tail returns the end of a log, for errors.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	if len(b) > 2000 {
		b = b[len(b)-2000:]
	}
	return "  " + strings.ReplaceAll(strings.TrimSpace(string(b)), "\n", "\n  ")
}

func errOr(err error, text string) error {
	if err != nil {
		return err
	}
	return errors.New(text)
}
