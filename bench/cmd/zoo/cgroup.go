package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// cgroups limits the CPU of processes, by version 2 of the kernel's interface or, where its
// CPU controller is bound there, version 1.
type cgroups struct {
	root string // "" without any
	v2   bool
	made []string
}

func newCgroups() *cgroups {
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		b, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
		if err == nil && strings.Contains(string(b), "cpu ") {
			return &cgroups{root: root, v2: true}
		}
	}
	if _, err := os.Stat("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"); err == nil {
		return &cgroups{root: "/sys/fs/cgroup/cpu"}
	}
	// The root group of version 1 has no quota of its own.
	if fi, err := os.Stat("/sys/fs/cgroup/cpu/cgroup.procs"); err == nil && !fi.IsDir() {
		return &cgroups{root: "/sys/fs/cgroup/cpu"}
	}
	return &cgroups{}
}

// try reports why processes cannot be limited.
func (g *cgroups) try() error {
	if g.root == "" {
		return fmt.Errorf("no CPU controller of cgroups is mounted")
	}
	dir, err := g.make("try", 0.5)
	if err == nil {
		err = os.Remove(dir)
	}
	return err
}

// make makes a group with a share of one CPU.
func (g *cgroups) make(name string, share float64) (dir string, err error) {
	dir = filepath.Join(g.root, fmt.Sprintf("zoo-%d-%s", os.Getpid(), name))
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return "", fmt.Errorf("make a cgroup: %w", err)
	}
	g.made = append(g.made, dir)
	quota := strconv.Itoa(int(share * 100000))
	file, text := "cpu.max", quota+" 100000"
	if !g.v2 {
		file, text = "cpu.cfs_quota_us", quota
		if err := os.WriteFile(filepath.Join(dir, "cpu.cfs_period_us"), []byte("100000"), 0o644); err != nil {
			return "", fmt.Errorf("limit a cgroup: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
		return "", fmt.Errorf("limit a cgroup: %w", err)
	}
	return dir, nil
}

// limit gives a process a share of one CPU.
func (g *cgroups) limit(pid int, name string, share float64) error {
	dir, err := g.make(name, share)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644)
}

// remove removes the groups, whose processes have ended.
func (g *cgroups) remove() {
	for _, dir := range g.made {
		for range 100 {
			if err := os.Remove(dir); err == nil || os.IsNotExist(err) {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	g.made = nil
}
