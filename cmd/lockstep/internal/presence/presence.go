// Package presence is how the processes of one node, and of one user, find each other
// in the runtime directory, which they share anyway: the agent and a job's master hold a
// lock there while they live, with their addresses; lockstep attach leaves a note for as
// long as the process that it has become lives, and who serves attached processes only
// ends some time after the last.
//
// What another user has put there is not believed, and a lock says nothing of trust: an
// agent and a master look at each other's identity as ever.
package presence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Info is what a process that is there says of itself.
type Info struct {
	PID     int      `json:"pid"`
	Web     string   `json:"web"`               // host:port of its pages
	Agents  string   `json:"agents,omitempty"`  // a master's: where agents connect
	Masters []string `json:"masters,omitempty"` // an agent's: --master, the masters it was told of
}

// Agent and Master are the names under which a node's agent and a job's master are there.
const Agent = "agent"

func Master(job string) string { return "master-" + job }

const maxInfo = 4 << 10

// own is this user's directory below the base of all users': who has made the base may lead
// names in it elsewhere, or have taken them.
func own(base string) (string, error) {
	dir, _, err := record.DirBelow(base, "")
	return dir, err
}

func path(dir, name string, uid int) string {
	return filepath.Join(dir, fmt.Sprintf(".%s.%d.lock", name, uid))
}

// lookFor is for how long a lock that cannot be had may be held by one that only looks: a process
// that is not scheduled meanwhile looks for long.
const lookFor = 5 * time.Second

// Hold tells that this process is there, until release. It fails when another one is.
func Hold(dir, name string, info Info) (release func(), err error) {
	for until := time.Now().Add(lookFor); ; time.Sleep(5 * time.Millisecond) {
		release, err := hold(dir, name, info)
		if !errors.Is(err, syscall.EWOULDBLOCK) || time.Now().After(until) {
			return release, err
		}
		// Who looks shares the lock with who looks, for a moment; who is there shares it with nobody.
		if _, there := Find(dir, name); there {
			return nil, err
		}
	}
}

func hold(dir, name string, info Info) (release func(), err error) {
	dir, err = own(dir)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path(dir, name, os.Geteuid()), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: another one is there: %w", f.Name(), err)
	}
	info.PID = os.Getpid()
	b, err := json.Marshal(info)
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(b, 0)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return func() {
		_ = f.Truncate(0) // the next one has the lock for a moment before it says who it is
		f.Close()
	}, nil
}

// Find returns what the process of that name says of itself, when one of this user is there.
func Find(dir, name string) (Info, bool) {
	dir, err := own(dir)
	if err != nil {
		return Info{}, false
	}
	return find(path(dir, name, os.Geteuid()), os.Geteuid())
}

func find(path string, uid int) (info Info, ok bool) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return info, false
	}
	defer f.Close()
	if !owned(f, uid) {
		return info, false
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB); !errors.Is(err, syscall.EWOULDBLOCK) {
		return info, false // nobody holds it
	}
	b, err := io.ReadAll(io.LimitReader(f, maxInfo))
	if err != nil || json.Unmarshal(b, &info) != nil {
		return info, false // it is about to write
	}
	return info, true
}

func owned(f *os.File, uid int) bool {
	fi, err := f.Stat()
	if err != nil {
		return false
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && fi.Mode().IsRegular() && int(st.Uid) == uid
}

// Turn waits until no other process of this user has its turn, or ctx ends.
func Turn(ctx context.Context, dir string) (end func(), err error) {
	for {
		end, err := Hold(dir, "attach", Info{})
		if err == nil {
			return end, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Attach leaves a note that the process with this pid is of job, for as long as it lives.
func Attach(dir, job string, pid int) error {
	dir, err := own(dir)
	if err != nil {
		return err
	}
	start, err := startOf(pid)
	if err != nil {
		return err
	}
	name := filepath.Join(dir, fmt.Sprintf(".attached.%d.%d", os.Geteuid(), pid))
	return os.WriteFile(name, []byte(start+" "+job), 0o600)
}

// Attached counts the living processes of this user that have left a note for job (any
// job for ""), and removes notes of dead ones. A node's ranks with recorders count, too.
func Attached(dir, job string) (n int) {
	uid := os.Geteuid()
	dir, err := own(dir)
	if err != nil {
		return 0
	}
	notes, _ := filepath.Glob(filepath.Join(dir, fmt.Sprintf(".attached.%d.*", uid))) // the pattern is well-formed
	for _, note := range notes {
		f, err := os.OpenFile(note, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		mine := owned(f, uid)
		b, err := io.ReadAll(io.LimitReader(f, maxInfo))
		f.Close()
		if !mine || err != nil {
			continue
		}
		pid, err := strconv.Atoi(note[strings.LastIndexByte(note, '.')+1:])
		if err != nil {
			continue
		}
		was, of, _ := strings.Cut(string(b), " ")
		if start, err := startOf(pid); err != nil || start != was {
			os.Remove(note)
			continue
		}
		if job == "" || of == job {
			n++
		}
	}
	if n > 0 {
		return n
	}
	paths, _ := record.List(dir) // else there is none
	for _, p := range paths {
		r, err := record.Open(p)
		if err != nil {
			continue
		}
		if h := r.Header(); (job == "" || h.Job == job) && !h.Closed && r.Alive() {
			n++
		}
		r.Close()
	}
	return n
}

// startOf is when a living process started, in the kernel's words.
func startOf(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	_, rest, _ := strings.Cut(string(b[max(0, strings.LastIndexByte(string(b), ')')):]), ") ")
	f := strings.Fields(rest)
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return "", fmt.Errorf("process %d: it has ended", pid)
	}
	return f[19], nil
}

// Linger is how long who serves attached processes outlives the last of them: for last
// words, and for the next one of a script.
const Linger = 5 * time.Second

// lingerEnv is another duration in Linger's place.
const lingerEnv = "LOCKSTEP_ATTACH_LINGER"

func linger() time.Duration {
	if d, err := time.ParseDuration(os.Getenv(lingerEnv)); err == nil && d >= 0 {
		return d
	}
	return Linger
}

// WhileAttached returns a context that ends when ctx does, or when no process of job (any
// for "") has been attached for Linger, or what the environment says.
func WhileAttached(ctx context.Context, dir, job string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		last, linger := time.Now(), linger()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if Attached(dir, job) > 0 {
				last = time.Now()
			}
			if time.Since(last) > linger {
				cancel()
				return
			}
		}
	}()
	return ctx, cancel
}
