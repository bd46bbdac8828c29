package agent

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pidStart names a process for as long as the host is up: its number may be another's later.
type pidStart struct {
	pid   int
	start uint64
}

// held is a process that the fencer holds by a pidfd: what it does reaches no other.
type held struct {
	fd      int
	name    string
	terms   terms
	ordered bool
	rank    bool
	fate    fate
	termAt  time.Time
	due     time.Time // SIGKILL, from the first SIGTERM to its attempt on
	latest  time.Time
	killAt  time.Time
	trouble string
}

type fate uint8

const (
	lives   fate = iota
	spared       // it lives, and its environment does not allow more
	failed       // it lives, and cannot be told
	ended        // by itself
	stopped      // after SIGTERM
	killed       // after SIGKILL
)

// errForeign is returned for a process of another user than its recorder's owner.
var errForeign = errors.New("another user's process")

// hold opens a process, and then checks that it is the one meant: its start, and that it runs
// as the user who owns its recorder. A process that has ended is held as such.
func hold(key pidStart, path string, probe bool) (*held, error) {
	if key.pid <= 1 || key.pid == os.Getpid() || key.pid == os.Getppid() {
		return nil, fmt.Errorf("process %d is not to be stopped", key.pid)
	}
	fd, err := unix.PidfdOpen(key.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return &held{fd: -1, fate: ended}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", key.pid, err)
	}
	start, _, err := startOf(key.pid)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		start, err = 0, nil // no process's
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("process %d: %w", key.pid, err)
	}
	if start != key.start { // it has ended, and somebody else may have its number
		unix.Close(fd)
		return &held{fd: -1, fate: ended}, nil
	}
	if path != "" {
		uid, ok := owner(path)
		mine := probe && (uid == 0 || int(uid) == os.Geteuid()) // the agent's own word about another's process
		if !mine && (!ok || !runsAs(key.pid, uid)) {
			unix.Close(fd)
			return nil, fmt.Errorf("process %d, which its recorder names: %w", key.pid, errForeign)
		}
	}
	return &held{fd: fd}, nil
}

// runsAs reports whether all of a process's users are uid.
func runsAs(pid int, uid uint32) bool { return userOf(pid) == int64(uid) }

// userOf is the user that a process runs as, -1 when it has several or cannot be read.
func userOf(pid int) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return -1
	}
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte("Uid:")); ok {
			fields := slices.Compact(strings.Fields(string(rest)))
			if len(fields) != 1 {
				return -1
			}
			if uid, err := strconv.ParseUint(fields[0], 10, 32); err == nil {
				return int64(uid)
			}
			return -1
		}
	}
	return -1
}

// gone reports whether the process of a pidfd has ended.
func gone(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLIN != 0
}
