package kubelab

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// watch follows the JobSet's restarts.
func (c *chart) watch() {
	ctx, stop := context.WithCancel(c.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil { // a watch ends with its API server
			c.follow(ctx)
		}
	}()
	c.t.Cleanup(func() { stop(); <-done })
}

func (c *chart) follow(ctx context.Context) {
	cmd := exec.CommandContext(ctx, "kubectl", "-n", "training", "get", "jobset", "train", "-w", "-o", `jsonpath={.status.restarts}{"\n"}`)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return
	}
	for s := bufio.NewScanner(out); s.Scan(); {
		n, _ := strconv.Atoi(s.Text())
		c.mu.Lock()
		if n != c.restarts {
			c.restarts, c.restarted = n, time.Now()
		}
		c.mu.Unlock()
	}
	if cmd.Wait() != nil {
		time.Sleep(200 * time.Millisecond)
	}
}

func (c *chart) attempt() (int, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.restarts, c.restarted
}

// rank is a process of the job, or another one of lockstep's.
type rank struct {
	pid, rank, attempt int
	node               string
}

// ranks are the processes of the job's attempts from one on.
func (c *chart) ranks(from int) (all []rank) {
	all = slices.DeleteFunc(c.processes("train"), func(p rank) bool { return p.attempt < from })
	slices.SortFunc(all, func(a, b rank) int { return a.rank - b.rank })
	return all
}

// processes of a command of lockstep's, of whatever node of this cluster: the machine sees all.
func (c *chart) processes(command string) (all []rank) {
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range dirs {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(line, []byte("lockstep\x00"+command+"\x00")) {
			continue
		}
		dir := filepath.Dir(file)
		if group, _ := os.ReadFile(filepath.Join(dir, "cgroup")); !bytes.Contains(group, []byte("/"+c.name+"/")) {
			continue
		}
		env, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil || len(env) == 0 { // a zombie has none
			continue
		}
		var p rank
		p.pid, _ = strconv.Atoi(filepath.Base(dir))
		for kv := range strings.SplitSeq(string(env), "\x00") {
			switch k, v, _ := strings.Cut(kv, "="); k {
			case "LOCKSTEP_NODE":
				p.node = v
			case "LOCKSTEP_RANK":
				p.rank, _ = strconv.Atoi(v)
			case "LOCKSTEP_RESTART_COUNT":
				p.attempt, _ = strconv.Atoi(v)
			}
		}
		all = append(all, p)
	}
	return all
}

func (c *chart) signal(p rank, s syscall.Signal) {
	if err := syscall.Kill(p.pid, s); err != nil {
		c.t.Fatalf("%v of rank %d: %v", s, p.rank, err)
	}
}

// starve leaves a rank one hundredth of a core.
func (c *chart) starve(p rank) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.pid))
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case slices.Contains(strings.Split(part[1], ","), "cpu"):
			err = os.WriteFile(filepath.Join("/sys/fs/cgroup/cpu", part[2], "cpu.cfs_quota_us"), []byte("1000"), 0)
		case part[1] == "" && strings.Contains(part[2], "kubepods"):
			err = os.WriteFile(filepath.Join("/sys/fs/cgroup", part[2], "cpu.max"), []byte("1000 100000"), 0)
		default:
			continue
		}
		if err != nil {
			c.t.Fatal(err)
		}
		return
	}
	c.t.Fatalf("rank %d has no cgroup of its own: %s", p.rank, b)
}

// steps are those that the job has finished.
func (c *chart) steps() int {
	b, _ := os.ReadFile(c.losses)
	return bytes.Count(b, []byte("\n"))
}
