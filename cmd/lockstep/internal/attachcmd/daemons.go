package attachcmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/presence"
)

// daemons sees that the node has an agent and, where the plan wants it, the job a master.
// pid is the process that they are there for. It says where their pages are.
func (c *Cmd) daemons(ctx context.Context, p *Plan, exe string, pid int) (said []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	end, err := presence.Turn(ctx, c.RuntimeDir)
	if err != nil {
		return nil, fmt.Errorf("wait for this node's other ranks to attach: %w", err)
	}
	defer end()
	if err := presence.Attach(c.RuntimeDir, p.Job, pid); err != nil {
		return nil, err
	}
	var errs []error
	if p.Lead {
		there, started, err := c.daemon(ctx, exe, presence.Master(p.Job), c.masterArgs(p))
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("the job's master: %w", err))
		default:
			said = append(said, fmt.Sprintf("master %s at http://%s/status", verb(started), near(there.Web)))
		}
	}
	there, started, err := c.daemon(ctx, exe, presence.Agent, c.agentArgs(p))
	switch {
	case err != nil:
		errs = append(errs, fmt.Errorf("this node's agent: %w", err))
	default:
		said = append(said, fmt.Sprintf("agent %s at http://%s/metrics", verb(started), near(there.Web)))
		if !started && p.Master != "" && !reports(there, p.Job, p.Master) {
			errs = append(errs, fmt.Errorf("this node's agent was there before and reports to other masters than %s: nobody judges this job; start the agent with --master %s=%s", p.Master, p.Job, p.Master))
		}
	}
	return said, errors.Join(errs...)
}

// reports tells whether an agent was told that this is the job's master.
func reports(agent presence.Info, job, master string) bool {
	of, err := flags.Masters(agent.Masters)
	return err == nil && of(job) == master
}

// near is an address that this host's browser can open.
func near(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); err == nil && (ip == nil || ip.IsUnspecified()) {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return addr
}

func verb(started bool) string {
	if started {
		return "started"
	}
	return "found"
}

func (c *Cmd) agentArgs(p *Plan) []string {
	args := []string{"agent", "--while-attached", "--node", c.node(p), "--runtime-dir", c.RuntimeDir, "--web.listen-address", listen(c.AgentWeb)}
	if p.Master != "" {
		args = append(args, "--master", p.Job+"="+p.Master)
	}
	if c.PKI != "" {
		args = append(args, c.certificate("agent-"+c.node(p))...)
	}
	return args
}

func (c *Cmd) masterArgs(p *Plan) []string {
	args := []string{"master", "--job", p.Job, "--while-attached", c.RuntimeDir, "--state-dir", filepath.Join(c.StateDir, p.Job), "--web.listen-address", listen(c.MasterWeb)}
	if c.Patience > 0 {
		args = append(args, "--start-patience", c.Patience.String())
	}
	if p.Beyond {
		return append(append(args, "--listen", fmt.Sprint(":", masterPort)), c.certificate("master-"+p.Job)...)
	}
	return append(args, "--listen", "127.0.0.1:0")
}

// certificate is the flags for the files that lockstep pki has made.
func (c *Cmd) certificate(name string) []string {
	file := func(n string) string { return filepath.Join(c.PKI, n) }
	return []string{"--tls.cert", file(name + ".crt"), "--tls.key", file(name + ".key"), "--tls.ca", file("ca.crt")}
}

func (c *Cmd) node(p *Plan) string {
	if c.Node != "" {
		return c.Node
	}
	return p.Who.Node
}

// listen is addr when it is free, else any port of it: another job of this node has it.
func listen(addr string) string {
	l, err := net.Listen("tcp", addr)
	if err == nil {
		l.Close()
		return addr
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	return net.JoinHostPort(host, "0")
}

// daemon returns the process of that name, which it starts when there is none.
func (c *Cmd) daemon(ctx context.Context, exe, name string, args []string) (there presence.Info, started bool, err error) {
	if there, ok := presence.Find(c.RuntimeDir, name); ok {
		return there, false, nil
	}
	if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
		return there, false, err
	}
	path := filepath.Join(c.StateDir, name+".log")
	log, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return there, false, err
	}
	defer log.Close()
	pid, err := spawn(exe, args, log)
	if err != nil {
		return there, false, err
	}
	for {
		gone := ended(pid)
		if there, ok := presence.Find(c.RuntimeDir, name); ok {
			return there, true, nil
		}
		if gone {
			return there, true, fmt.Errorf("it was started and has ended; it says: %s (%s)", lastLine(path), path)
		}
		select {
		case <-ctx.Done():
			return there, true, fmt.Errorf("it was started and is not ready in time; it says: %s (%s)", lastLine(path), path)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// spawn starts a process that is nobody's child: what attach becomes would have a child
// that it knows nothing of. A shell in between ends at once, and tells its number.
func spawn(exe string, args []string, log *os.File) (pid int, err error) {
	cmd := exec.Command("/bin/sh", append([]string{"-c", `"$@" >&3 2>&3 3>&- & echo $!`, "sh", exe}, args...)...)
	cmd.ExtraFiles = []*os.File{log}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, kv := range os.Environ() { // what attach's own flags say is passed on by flags
		if k, _, _ := strings.Cut(kv, "="); k != "LOCKSTEP_MASTER" && k != "LOCKSTEP_JOB" && k != "LOCKSTEP_NODE" {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	defer keepOwn()()
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", exe, err)
	}
	return strconv.Atoi(strings.TrimSpace(string(out)))
}

// ended reports whether a process is no more, or nothing but a number that nobody has asked for.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(after, "Z") || strings.HasPrefix(after, "X")
}

// keepOwn has nothing that attach was given (a lock, a pipe) be inherited, until release: it is the command's, and what attach
// starts would hold it for longer.
func keepOwn() (release func()) {
	names, _ := os.ReadDir("/proc/self/fd") // none: then it is inherited
	var own []int
	for _, n := range names {
		fd, err := strconv.Atoi(n.Name())
		if flags, e := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && e == nil && fd > 2 && flags&unix.FD_CLOEXEC == 0 {
			unix.CloseOnExec(fd)
			own = append(own, fd)
		}
	}
	return func() {
		for _, fd := range own {
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0)
		}
	}
}

// lastLine is the end of a log, for a warning.
func lastLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if l := lines[len(lines)-1]; l != "" {
		return l
	}
	return "nothing"
}
