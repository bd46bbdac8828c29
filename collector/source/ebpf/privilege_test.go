package ebpf_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/record"
)

const nobody = 65534

// beUnprivileged is a source in a process of its own: it says whether it works, and then works
// until its input ends.
func beUnprivileged() {
	var v source.View
	s := ebpf.New(ebpf.Options{Dir: os.Getenv("LOCKSTEP_TEST_DIR"), Node: "here", Scan: 20 * time.Millisecond, Log: slog.New(slog.DiscardHandler)})
	v.Now = record.Now()
	err := s.Update(&v)
	switch {
	case errors.Is(err, ebpf.ErrNotPermitted) && errors.Is(err, source.ErrNoData):
		fmt.Printf("not permitted %q\n", v.Probes.Missing)
	case err != nil:
		fmt.Println(err)
	default:
		fmt.Println("works")
	}
	over := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(over)
	}()
	for running := true; running; {
		select {
		case <-over:
			running = false
		case <-time.After(20 * time.Millisecond):
			v.Now = record.Now()
			_ = s.Update(&v)
		}
	}
	if err := s.Close(); err != nil {
		fmt.Println(err)
	}
	os.Exit(0)
}

// as starts a source as another user with the given capabilities and no others, and
// returns what it says.
func (j *job) as(caps ...uintptr) string {
	j.t.Helper()
	if os.Getuid() != 0 {
		j.t.Skip("it takes root to become another user")
	}
	cmd := exec.Command("/proc/self/exe") // its own path may lie in a directory that others may not see
	cmd.Env = []string{"LOCKSTEP_TEST_AS=source", "LOCKSTEP_TEST_DIR=" + j.dir}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, AmbientCaps: caps}
	in, err := cmd.StdinPipe()
	if err != nil {
		j.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		j.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		j.t.Skip("a process of another user: ", err)
	}
	j.t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			j.t.Error(err)
		}
	})
	said, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		j.t.Fatal(err)
	}
	return strings.TrimSpace(said)
}

// ownDir is a directory of recorders that the other user may write to.
func (j *job) ownDir() {
	j.t.Helper()
	dir, err := os.MkdirTemp("", "recorders")
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, nobody, nobody); err != nil {
		j.t.Skip("a directory of another user: ", err)
	}
	j.dir = dir
}

func TestWithoutPrivileges(t *testing.T) {
	j := newJob(t, 1)
	j.ownDir()
	if said := j.as(); said != `not permitted "not_permitted"` {
		t.Errorf("without capabilities: %s", said)
	}
}

func TestLeastPrivileges(t *testing.T) {
	for _, c := range []struct {
		name string
		rank *syscall.Credential // whose the rank is; nil for root
		caps []uintptr
	}{
		{"ranks of the same user", &syscall.Credential{Uid: nobody, Gid: nobody}, []uintptr{unix.CAP_BPF, unix.CAP_PERFMON}},
		{"ranks of other users", nil, []uintptr{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_SYS_PTRACE, unix.CAP_DAC_READ_SEARCH}},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(t, 1)
			probe := ebpf.New(ebpf.Options{Dir: j.dir}) // root may; if not, nobody may
			err := probe.Update(&j.v)
			probe.Close()
			skipUnless(t, err)
			j.ownDir()
			cmd := exec.Command(filepath.Join(standIn(t), "rank"), "0", "1", filepath.Join(j.dir, "steps"))
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.rank}
			r := j.startAs(0, cmd)
			r.do("hello")
			if said := j.as(c.caps...); said != "works" {
				if strings.Contains(said, "not permitted") {
					t.Skip("uprobe_multi is newer than this kernel, and perf events take CAP_SYS_ADMIN there: ", said)
				}
				t.Fatal(said)
			}
			// Nobody says when the probes are there: a communicator made later is followed.
			deadline := time.Now().Add(2 * time.Minute)
			for n := 0; ; n++ {
				r.do("init world%d", n)
				r.do("call AllReduce 3")
				if paths, _ := record.List(j.dir); len(paths) > 0 {
					rec, err := record.Open(paths[0])
					if err != nil {
						t.Fatal(err)
					}
					h, comms := rec.Header(), rec.Comms(nil)
					rec.Close()
					if h.Job == "standin" && slices.ContainsFunc(comms, func(c record.CommStatus) bool { return c.Finished == 3 }) {
						return
					}
				}
				if time.Now().After(deadline) {
					t.Fatal("not within two minutes: a recorder of the rank")
				}
				r.do("leave")
				time.Sleep(200 * time.Millisecond)
			}
		})
	}
}
