package proc_test

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/procfs"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/proc"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

func TestMain(m *testing.M) {
	child()
	goleak.VerifyTestMain(m)
}

const boot = "11111111222233334444555555555555"

// tree is a fixture of /proc.
type tree struct {
	t    *testing.T
	root string
}

func newTree(t *testing.T) *tree {
	tr := &tree{t, t.TempDir()}
	tr.write("sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n")
	return tr
}

func (tr *tree) write(name, text string) {
	tr.t.Helper()
	path := filepath.Join(tr.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		tr.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		tr.t.Fatal(err)
	}
}

func stat(pid int, state string, ticks, start int) string {
	return fmt.Sprintf("%d (python3 (x) )) %s 1 1 1 0 -1 4194560 1 0 0 0 %d 0 0 0 20 0 9 0 %d 1000 10 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n", pid, state, ticks, start)
}

func (tr *tree) process(pid int, state string, ticks, start, bytes int) {
	tr.write(fmt.Sprintf("%d/stat", pid), stat(pid, state, ticks, start))
	tr.write(fmt.Sprintf("%d/io", pid), fmt.Sprintf("rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 0\nwrite_bytes: %d\ncancelled_write_bytes: 0\n", bytes))
}

func (tr *tree) thread(pid, tid int, state string) {
	tr.write(fmt.Sprintf("%d/task/%d/stat", pid, tid), stat(tid, state, 0, 1))
}

func process(pid int, start uint64, bootID string) *source.Process {
	p := &source.Process{}
	p.PID, p.StartTime = int32(pid), start
	b, _ := hex.DecodeString(bootID)
	copy(p.BootID[:], b)
	return p
}

// passes runs n passes, 100 ms apart.
func passes(s *proc.Source, v *source.View, n int) (err error) {
	for range n {
		v.Now += int64(100 * time.Millisecond)
		err = s.Update(v)
	}
	return err
}

func open(t *testing.T, root string) *proc.Source {
	t.Helper()
	s, err := proc.New(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	s.Wait()
	return s
}

// impatient is a source whose passes do not wait for reads that hang.
func impatient(t *testing.T, root string) *proc.Source {
	t.Helper()
	s, err := proc.New(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestStates(t *testing.T) {
	const start = 500
	for _, c := range []struct {
		name   string
		state  string
		start  int
		closed bool
		want   diagnosis.ProcState
	}{
		{"running", "R", start, false, diagnosis.ProcRunning},
		{"sleeping", "S", start, false, diagnosis.ProcRunning},
		{"stopped", "T", start, false, diagnosis.ProcStopped},
		{"traced", "t", start, false, diagnosis.ProcStopped},
		{"disk", "D", start, false, diagnosis.ProcDisk},
		{"zombie", "Z", start, false, diagnosis.ProcGone},
		{"zombie in good order", "Z", start, true, diagnosis.ProcExited},
		{"recycled pid", "R", start + 1, false, diagnosis.ProcGone},
		{"gone", "", 0, false, diagnosis.ProcGone},
		{"exited", "", 0, true, diagnosis.ProcExited},
		{"garbage", "\x00\xff(", start, false, diagnosis.ProcUnknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr := newTree(t)
			switch {
			case c.name == "garbage":
				tr.write("42/stat", c.state)
			case c.state != "":
				tr.process(42, c.state, 0, c.start, 0)
			}
			p := process(42, start, boot)
			p.Closed = c.closed
			v := source.View{Processes: []*source.Process{p}}
			err := passes(open(t, tr.root), &v, 3)
			if p.State != c.want || p.StateAt == 0 || (err != nil) != (c.want == diagnosis.ProcUnknown) {
				t.Errorf("state %v at %d, error %v", p.State, p.StateAt, err)
			}
		})
	}
	t.Run("another boot", func(t *testing.T) {
		tr := newTree(t)
		tr.process(42, "R", 0, start, 0)
		p := process(42, start, strings.Repeat("ab", 16))
		if err := passes(open(t, tr.root), &source.View{Processes: []*source.Process{p}}, 1); err != nil || p.State != diagnosis.ProcGone {
			t.Errorf("state %v, error %v", p.State, err)
		}
	})
}

func TestRates(t *testing.T) {
	tr := newTree(t)
	s := open(t, tr.root)
	p := process(42, 500, boot)
	v := source.View{Processes: []*source.Process{p}}
	for i := range 30 {
		tr.process(42, "R", 5*i, 500, 0) // 50 ms of CPU each 100 ms
		_ = passes(s, &v, 1)
	}
	if p.CPU < 0.49 || p.CPU > 0.51 || p.IO {
		t.Errorf("CPU %g, IO %v", p.CPU, p.IO)
	}
	tr.process(42, "R", 5*29, 500, 4096)
	_ = passes(s, &v, 2)
	if !p.IO {
		t.Error("a write of 4096 bytes is no IO")
	}
	_ = passes(s, &v, 15)
	if p.IO || p.CPU != 0 {
		t.Errorf("long after: CPU %g, IO %v", p.CPU, p.IO)
	}
}

// TestAThreadInDiskSleep: the first thread sleeps, another one hangs in the kernel.
func TestAThreadInDiskSleep(t *testing.T) {
	tr := newTree(t)
	s := open(t, tr.root)
	tr.process(42, "S", 7, 500, 0)
	tr.thread(42, 42, "S")
	tr.thread(42, 43, "D")
	p := process(42, 500, boot)
	v := source.View{Processes: []*source.Process{p}}
	_ = passes(s, &v, 5)
	if p.State != diagnosis.ProcRunning {
		t.Errorf("state %v before the process is known to be idle", p.State)
	}
	_ = passes(s, &v, 20)
	if p.State != diagnosis.ProcDisk {
		t.Errorf("state %v", p.State)
	}
	tr.thread(42, 43, "S")
	_ = passes(s, &v, 1)
	if p.State != diagnosis.ProcRunning {
		t.Errorf("state %v after it woke up", p.State)
	}
}

// TestForeignPIDNamespace: a process that writes on is not gone, whatever /proc says.
func TestForeignPIDNamespace(t *testing.T) {
	s := open(t, newTree(t).root)
	p := process(42, 500, boot)
	v := source.View{Processes: []*source.Process{p}}
	p.Appended = 10
	_ = passes(s, &v, 2)
	if p.State != diagnosis.ProcGone {
		t.Fatalf("state %v", p.State)
	}
	p.Appended++ // written before the end, read after it
	_ = passes(s, &v, 3)
	if p.State != diagnosis.ProcGone {
		t.Fatalf("state %v", p.State)
	}
	p.Appended++
	_ = passes(s, &v, 1)
	if p.State != diagnosis.ProcUnknown {
		t.Errorf("state %v", p.State)
	}
}

// A process in a container has another pid here; another one may have its own.
func TestPIDOfAContainer(t *testing.T) {
	tr := newTree(t)
	tr.process(42, "R", 0, 900, 0)
	for pid, inner := range map[int]string{9041: "9041\t41", 9042: "9042\t7\t42", 9043: "9043\t43"} {
		tr.process(pid, "S", 0, 500, 0)
		tr.write(fmt.Sprintf("%d/status", pid), "Name:\tpython3\nNSpid:\t"+inner+"\n")
	}
	p := process(42, 500, boot)
	v := source.View{Processes: []*source.Process{p}}
	s := open(t, tr.root)
	if err := passes(s, &v, 1); err != nil || p.State != diagnosis.ProcRunning || p.HostPID != 9042 {
		t.Errorf("state %v of pid %d, error %v", p.State, p.HostPID, err)
	}
	tr.process(9042, "T", 0, 500, 0)
	if _ = passes(s, &v, 1); p.State != diagnosis.ProcStopped {
		t.Errorf("stopped: state %v", p.State)
	}
	if err := os.RemoveAll(filepath.Join(tr.root, "9042")); err != nil {
		t.Fatal(err)
	}
	if _ = passes(s, &v, 2); p.State != diagnosis.ProcGone {
		t.Errorf("gone: state %v", p.State)
	}
}

// Containers that start together have processes of the same pid and start: whose
// recorder it is tells them apart.
func TestSamePIDInTwoContainers(t *testing.T) {
	tr := newTree(t)
	p := process(42, 500, boot)
	p.Path = filepath.Join(t.TempDir(), "rank.rec")
	if err := os.WriteFile(p.Path, []byte("recorder"), 0o600); err != nil {
		t.Fatal(err)
	}
	var file syscall.Stat_t
	if err := syscall.Stat(p.Path, &file); err != nil {
		t.Fatal(err)
	}
	for pid := 9041; pid <= 9043; pid++ {
		tr.process(pid, "S", 0, 500, 0)
		tr.write(fmt.Sprintf("%d/status", pid), fmt.Sprintf("Name:\tpython3\nNSpid:\t%d\t42\n", pid))
		tr.write(fmt.Sprintf("%d/maps", pid), "7f0000000000-7f0000001000 r--p 00000000 00:00 0 \n")
	}
	v := source.View{Processes: []*source.Process{p}}
	s := open(t, tr.root)
	if err := passes(s, &v, 1); err == nil || p.State != diagnosis.ProcUnknown {
		t.Errorf("any of three: state %v, error %v", p.State, err)
	}
	if err := passes(s, &v, 5); err == nil || p.State != diagnosis.ProcUnknown {
		t.Errorf("any of three: state %v, error %v", p.State, err)
	}
	tr.write("9042/maps", fmt.Sprintf("7f0000000000-7f0000001000 rw-s 00000000 %x:%x %d %s\n", unix.Major(file.Dev), unix.Minor(file.Dev), file.Ino, p.Path))
	if err := passes(s, &v, 10); err != nil || p.State != diagnosis.ProcRunning || p.HostPID != 9042 {
		t.Errorf("state %v of pid %d, error %v", p.State, p.HostPID, err)
	}
}

// A process that was never seen need not be dead: its recorder's anchors tell.
func TestNeverSeen(t *testing.T) {
	const second = int64(time.Second)
	setup := func(t *testing.T, closed bool) (*proc.Source, *source.Process, *source.View) {
		p := process(42, 500, boot)
		p.Anchor.Mono, p.Closed = 100*second, closed
		return open(t, newTree(t).root), p, &source.View{Now: 101 * second, Processes: []*source.Process{p}}
	}
	t.Run("that does not live", func(t *testing.T) {
		s, p, v := setup(t, false)
		if _ = passes(s, v, 5); p.State != diagnosis.ProcUnknown {
			t.Errorf("anchored a second ago: state %v", p.State)
		}
		v.Now = 401 * second
		if _ = passes(s, v, 2); p.State != diagnosis.ProcGone {
			t.Errorf("not anchored for long: state %v", p.State)
		}
	})
	t.Run("that has exited", func(t *testing.T) {
		s, p, v := setup(t, true)
		if _ = passes(s, v, 2); p.State != diagnosis.ProcExited {
			t.Errorf("state %v", p.State)
		}
	})
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprint("that lives elsewhere, closed at last: ", closed), func(t *testing.T) {
			s, p, v := setup(t, false)
			_ = passes(s, v, 2)
			p.Anchor.Mono += 5 * second
			_ = passes(s, v, 2)
			v.Now += 60 * second // it may be stopped
			if _ = passes(s, v, 2); p.State != diagnosis.ProcUnknown {
				t.Errorf("state %v", p.State)
			}
			want := diagnosis.ProcGone
			if p.Closed = closed; closed {
				want = diagnosis.ProcExited
			} else {
				v.Now += 300 * second
			}
			if _ = passes(s, v, 2); p.State != want {
				t.Errorf("at last: state %v, want %v", p.State, want)
			}
		})
	}
}

// TestHungRead: a read that does not return costs the news of that process only.
func TestHungRead(t *testing.T) {
	tr := newTree(t)
	tr.process(42, "R", 0, 500, 0)
	fifo := filepath.Join(tr.root, "43", "stat")
	if err := os.Mkdir(filepath.Dir(fifo), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	s := impatient(t, tr.root)
	ok, hangs := process(42, 500, boot), process(43, 500, boot)
	v := source.View{Processes: []*source.Process{hangs, ok}}
	var err error
	for deadline := time.Now().Add(20 * time.Second); err == nil && time.Now().Before(deadline); {
		err = passes(s, &v, 1)
	}
	if err == nil || !strings.Contains(err.Error(), "pid 43") {
		t.Fatalf("error %v", err)
	}
	for deadline := time.Now().Add(20 * time.Second); ok.State != diagnosis.ProcRunning && time.Now().Before(deadline); {
		_ = passes(s, &v, 1)
	}
	if ok.State != diagnosis.ProcRunning || hangs.State != diagnosis.ProcUnknown {
		t.Errorf("states %v and %v", ok.State, hangs.State)
	}
	// The read returns after all.
	w, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, stat(43, "R", 0, 500))
	w.Close()
	if err := os.Remove(fifo); err != nil {
		t.Fatal(err)
	}
	tr.process(43, "T", 0, 500, 0)
	for deadline := time.Now().Add(20 * time.Second); (err != nil || hangs.State != diagnosis.ProcStopped) && time.Now().Before(deadline); {
		err = passes(s, &v, 1)
	}
	if err != nil || hangs.State != diagnosis.ProcStopped {
		t.Errorf("after the read returned: state %v, error %v", hangs.State, err)
	}
}

func BenchmarkUpdate(b *testing.B) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		b.Fatal(err)
	}
	pfs, _ := procfs.NewDefaultFS()
	self, err := pfs.Self()
	if err != nil {
		b.Fatal(err)
	}
	st, err := self.Stat()
	if err != nil {
		b.Fatal(err)
	}
	s, err := proc.New("/proc")
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	var v source.View
	for range 8 {
		v.Processes = append(v.Processes, process(os.Getpid(), st.Starttime, strings.ReplaceAll(strings.TrimSpace(string(id)), "-", "")))
	}
	b.ReportAllocs()
	for b.Loop() {
		v.Now += int64(100 * time.Millisecond)
		if err := s.Update(&v); err != nil {
			b.Fatal(err)
		}
	}
}
