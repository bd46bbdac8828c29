package recorder_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/source/proc"
	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/internal/stranger"
	"github.com/lockstep-ccl/lockstep/record"
)

// play is what another user does. JOB, RANK and COUNT say of what it makes recorders.
func play() error {
	rank, _ := strconv.Atoi(os.Getenv("RANK"))
	count, _ := strconv.Atoi(os.Getenv("COUNT"))
	o := record.Options{Dir: os.Getenv("DIR"), RingSlots: 16, Identity: record.Identity{Job: os.Getenv("JOB"), Rank: int32(rank), WorldSize: 8}}
	for i := range max(count, 1) {
		o.Identity.Rank = int32(rank + i)
		w, err := record.Create(o)
		if err != nil {
			return err
		}
		switch stranger.Role() {
		case "rank":
		case "liar": // says that it is another process
			err = as(w.Path(), os.Getenv("PID"))
		case "open":
			err = os.Chmod(w.Path(), 0o666)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// as has a recorder say that it is of another process.
func as(path, pid string) error {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	n, err := strconv.Atoi(pid)
	start, err2 := strconv.ParseUint(strings.Fields(rest)[19], 10, 64)
	f, err3 := os.OpenFile(path, os.O_WRONLY, 0)
	if err := errors.Join(err, err2, err3); err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt(binary.LittleEndian.AppendUint32(nil, uint32(n)), 40)
	_, err2 = f.WriteAt(binary.LittleEndian.AppendUint64(nil, start), 64)
	return errors.Join(err, err2)
}

// machine is a node with a directory in which each user's lies, and its agent's sources.
type machine struct {
	*node
	base string
	proc *proc.Source
}

func newMachine(t *testing.T, o recorder.Options) *machine {
	m := &machine{base: filepath.Join(stranger.Open(t), "lockstep")}
	t.Setenv("LOCKSTEP_RUNTIME_DIR", "")
	o.Dir = m.base
	m.node = newNode(t, o)
	var err error
	if m.proc, err = proc.New("/proc"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.proc.Close() })
	return m
}

// start has a user make recorders of a job.
func (m *machine) start(uid uint32, role, job string, rank, count int, env ...string) *stranger.Process {
	m.t.Helper()
	dir := fmt.Sprintf("%s-%d", m.base, uid)
	return stranger.Start(m.t, uid, role, append([]string{"DIR=" + dir, "JOB=" + job, fmt.Sprint("RANK=", rank), fmt.Sprint("COUNT=", count)}, env...)...)
}

// look makes passes, and returns what is in view: JOB/RANK.
func (m *machine) look() (view []string, err error) {
	for range 3 {
		err = m.pass()
		_ = m.proc.Update(&m.v)
	}
	for _, p := range m.v.Processes {
		view = append(view, fmt.Sprintf("%s/%d", p.Job, p.Rank))
	}
	slices.Sort(view)
	return view, err
}

func (m *machine) wants(view ...string) {
	m.t.Helper()
	if got, _ := m.look(); !slices.Equal(got, view) {
		m.t.Errorf("in view: %v, want %v", got, view)
	}
}

func (m *machine) refuses(why recorder.Refusal, text string) {
	m.t.Helper()
	n := m.s.Refused()[why]
	_, err := m.look()
	if n == 0 || err == nil || !strings.Contains(err.Error(), text) {
		m.t.Errorf("%d refused for their %v, and %v; want one that says %q", n, why, err, text)
	}
	if again := m.s.Refused()[why]; again != n {
		m.t.Errorf("the same is refused again and again: %d, then %d", n, again)
	}
}

func TestAllUsersAreRead(t *testing.T) {
	m := newMachine(t, recorder.Options{})
	m.start(stranger.UID, "rank", "theirs", 0, 1)
	m.start(stranger.Other, "rank", "others", 0, 2)
	m.wants("others/0", "others/1", "theirs/0")
}

// TestAJobIsItsUsers: who comes later and names a job that runs is not heard, nor when its
// ranks have just died; when its user is gone for good, it is anybody's.
func TestAJobIsItsUsers(t *testing.T) {
	m := newMachine(t, recorder.Options{})
	victim := m.start(stranger.UID, "rank", "llm", 0, 1)
	m.wants("llm/0")
	m.start(stranger.Other, "rank", "llm", 1, 2)
	m.wants("llm/0")
	m.refuses(recorder.RefusedJob, "job \"llm\" is user 54321's")
	victim.In.Close()
	_ = victim.Wait()
	m.wants("llm/0")
	m.v.Now += 80e9 // 70 s later, and another attempt to read what was refused
	m.look()
	m.v.Now += 80e9
	m.wants("llm/1", "llm/2")
}

// TestATakenNameIsGivenBack: files of processes that nobody has seen living hold no job.
func TestATakenNameIsGivenBack(t *testing.T) {
	m := newMachine(t, recorder.Options{})
	squatter := m.start(stranger.Other, "rank", "llm", 5, 1)
	squatter.In.Close()
	_ = squatter.Wait()
	m.wants("llm/5")
	m.start(stranger.UID, "rank", "llm", 0, 1)
	m.wants("llm/0")
}

func TestOperatorSaysWhoseAJobIs(t *testing.T) {
	m := newMachine(t, recorder.Options{Users: map[string]uint32{"llm": stranger.UID}})
	m.start(stranger.Other, "rank", "llm", 5, 1)
	m.wants()
	m.refuses(recorder.RefusedJob, "as this agent was told")
	m.start(stranger.UID, "rank", "llm", 0, 1)
	m.wants("llm/0")
}

// TestNobodySpeaksOfOthersProcesses: a recorder that names a living process of another user.
func TestNobodySpeaksOfOthersProcesses(t *testing.T) {
	m := newMachine(t, recorder.Options{})
	m.start(stranger.Other, "liar", "llm", 3, 1, "PID="+strconv.Itoa(os.Getpid()))
	m.wants()
	m.refuses(recorder.RefusedProcess, fmt.Sprintf("process %d, of which it speaks, user 0's", os.Getpid()))
}

// TestSquattedDirectory: a directory, or a link, under another user's name is not read, and
// that user's recorders lie elsewhere and are.
func TestSquattedDirectory(t *testing.T) {
	m := newMachine(t, recorder.Options{})
	m.start(stranger.Other, "rank", "llm", 3, 1, fmt.Sprintf("DIR=%s-%d", m.base, stranger.UID))
	m.wants()
	m.refuses(recorder.RefusedDirectory, fmt.Sprintf("is user %d's, and its name user %d's", stranger.Other, stranger.UID))
	m.start(stranger.UID, "rank", "llm", 0, 1, fmt.Sprintf("DIR=%s-%d.0123456789abcdef", m.base, stranger.UID))
	m.wants("llm/0")
	if err := errors.Join(os.Symlink("lockstep-54321", m.base+"-77"), os.Lchown(m.base+"-77", stranger.Other, stranger.Other)); err != nil {
		t.Fatal(err)
	}
	m.v.Now += 2e9
	m.wants("llm/0")
	if n := m.s.Refused()[recorder.RefusedDirectory]; n != 2 {
		t.Errorf("%d directories refused, want 2", n)
	}
}

// TestFilesOfOthers: one that others can write is not read, nor one that lies in another
// user's directory.
func TestFilesOfOthers(t *testing.T) {
	m := newMachine(t, recorder.Options{})
	m.start(stranger.UID, "open", "llm", 0, 1)
	m.wants()
	if _, err := m.look(); err == nil || !strings.Contains(err.Error(), "others can write it") {
		t.Errorf("%v", err)
	}
	if err := os.RemoveAll(fmt.Sprintf("%s-%d", m.base, stranger.UID)); err != nil {
		t.Fatal(err)
	}
	dir := fmt.Sprintf("%s-%d", m.base, stranger.Other)
	m.start(stranger.Other, "rank", "theirs", 0, 1)
	paths, _ := record.List(dir)
	if len(paths) != 1 {
		t.Fatal(paths)
	}
	if err := os.Chown(paths[0], stranger.UID, stranger.UID); err != nil {
		t.Fatal(err)
	}
	m.wants()
	m.refuses(recorder.RefusedFile, "is user 54321's, in user 54322's directory")
}

// TestNobodyFillsTheView: a user with more recorders than there is room for leaves others
// their share, who come before and after.
func TestNobodyFillsTheView(t *testing.T) {
	m := newMachine(t, recorder.Options{Max: 8})
	m.start(stranger.UID, "rank", "before", 0, 2)
	m.wants("before/0", "before/1")
	m.start(stranger.Other, "rank", "flood", 0, 40)
	m.start(0, "rank", "after", 0, 2)
	view, _ := m.look()
	var mine int
	for _, v := range view {
		if !strings.HasPrefix(v, "flood/") {
			mine++
		}
	}
	if mine != 4 || len(view) != 8 {
		t.Errorf("in view: %v", view)
	}
	if m.s.Overflow() == 0 {
		t.Error("what is not read is not counted")
	}
}
