package process

import (
	"bytes"
	"context"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clear kills what former attempts, or a former supervisor that was killed
// itself, have left running outside their process groups, and waits for its end: it could hold
// the devices of the next attempt, or write into its checkpoints. It returns
// whether nothing is left within killPatience.
func (l *launcher) clear(ctx context.Context, secret string) bool {
	begin, look := time.Now(), true
	dying := map[int]bool{}
	for {
		found, ending := l.sweep(secret)
		if look { // what ends later was seen alive, and was somebody else's
			maps.Copy(dying, ending)
		}
		look = found > 0
		maps.DeleteFunc(dying, func(pid int, _ bool) bool { return !ends(pid) })
		switch {
		case found == 0 && (len(dying) == 0 || time.Since(begin) > strangersEnd):
			return true
		case time.Since(begin) > killPatience:
			return false
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return false
		}
	}
}

// strangersEnd is how long a process may be ending that cannot be told any more from what was looked for.
const strangersEnd = 2 * time.Second

// sweep kills what it finds. Such a process is known by the secret's path in its environment, which
// only the ranks of this directory get, and what they start. It returns how many there were, and
// which processes are ending and have no environment any more: any may have been one.
func (l *launcher) sweep(secret string) (found int, ending map[int]bool) {
	mark := []byte("\x00" + secretVar + "=" + secret + "\x00")
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		l.o.Logger.Warn("cannot look for what former attempts left running", "err", err)
		return 0, nil
	}
	ending = map[int]bool{}
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		p, err := os.FindProcess(pid) // a handle first: the kill must not reach the pid's next owner
		if err != nil {
			continue
		}
		switch env := environ(pid); {
		case bytes.Contains(append([]byte{0}, env...), mark):
			found++
			if p.Kill() == nil {
				l.o.Logger.Warn("killed what a former attempt had left running", "job", l.o.Job, "pid", pid)
			}
		case len(env) == 0 && ends(pid):
			ending[pid] = true
		}
		_ = p.Release()
	}
	return found, ending
}

// environ is a process's environment, of any of its threads that has one: the first one may have ended.
func environ(pid int) []byte {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	env, err := os.ReadFile(filepath.Join(dir, "environ"))
	if len(env) > 0 || os.IsPermission(err) {
		return env
	}
	if state, threads, _ := stat(pid); state != "Z" || threads < 2 {
		return nil
	}
	tasks, _ := os.ReadDir(filepath.Join(dir, "task"))
	for _, t := range tasks {
		if env, err := os.ReadFile(filepath.Join(dir, "task", t.Name(), "environ")); err == nil && len(env) > 0 {
			return env
		}
	}
	return nil
}

// ends reports whether a process is ending, and may still have files: a process lets go of
// its memory first, and with it of its environment.
func ends(pid int) bool {
	const exiting = 4 // PF_EXITING
	state, threads, flags := stat(pid)
	return flags&exiting != 0 && state != "X" && (state != "Z" || threads > 1)
}

// stat reads a process's state, the number of its threads and its flags.
func stat(pid int) (state string, threads int, flags uint64) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return "", 0, 0
	}
	_, rest, _ := strings.Cut(string(b[bytes.LastIndexByte(b, ')')+1:]), " ")
	f := strings.Fields(rest) // from the third on, as proc(5) counts
	if len(f) < 18 {
		return "", 0, 0
	}
	flags, _ = strconv.ParseUint(f[6], 10, 64)
	threads, _ = strconv.Atoi(f[17])
	return f[0], threads, flags
}
