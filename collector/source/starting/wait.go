package starting

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// wait is what a thread was in when it was looked at.
type wait = diagnosis.WaitIn

// wait says what a process's first thread waits in. The system call tells most and takes the
// right to trace the process; the kernel's function that it sleeps in takes less.
func (s *scanner) wait(pid int, state byte) wait {
	if state == 'R' {
		return diagnosis.WaitInUnknown
	}
	base := filepath.Join(s.proc, strconv.Itoa(pid))
	if text, err := os.ReadFile(filepath.Join(base, "syscall")); err == nil {
		if w := inCall(base, strings.Fields(string(text))); w != diagnosis.WaitInUnknown {
			return w
		}
	}
	text, _ := os.ReadFile(filepath.Join(base, "wchan")) // "0" or nothing where it is not told
	return inFunction(string(text))
}

// inCall is what the system call of a line of /proc/PID/syscall waits for.
func inCall(base string, f []string) wait {
	if len(f) < 2 {
		return diagnosis.WaitInUnknown // it runs
	}
	number, err := strconv.Atoi(f[0])
	if err != nil || number < 0 {
		return diagnosis.WaitInUnknown
	}
	w, ok := calls[number]
	if !ok || w != onFile {
		return w
	}
	fd, err := strconv.ParseUint(f[1], 0, 64)
	if err != nil {
		return diagnosis.WaitInUnknown
	}
	to, err := os.Readlink(filepath.Join(base, "fd", fmt.Sprint(int32(fd))))
	switch {
	case err != nil:
		return diagnosis.WaitInUnknown
	case strings.HasPrefix(to, "socket:"):
		return diagnosis.WaitInNetwork
	case strings.HasPrefix(to, "pipe:"):
		return diagnosis.WaitInPipe
	}
	return diagnosis.WaitInFile
}

// onFile stands for a call that waits for what its first argument is.
const onFile = ^wait(0)

// functions in which the kernel has a thread sleep, by how they begin: their names differ
// between kernels in what follows.
var functions = []struct {
	prefix string
	wait
}{
	{"hrtimer_nanosleep", diagnosis.WaitInSleep},
	{"do_nanosleep", diagnosis.WaitInSleep},
	{"common_nsleep", diagnosis.WaitInSleep},
	{"futex", diagnosis.WaitInLock},
	{"do_futex", diagnosis.WaitInLock},
	{"pipe_", diagnosis.WaitInPipe},
	{"anon_pipe_", diagnosis.WaitInPipe},
	{"wait_for_partner", diagnosis.WaitInPipe},
	{"do_wait", diagnosis.WaitInChild},
	{"kernel_wait", diagnosis.WaitInChild},
	{"locks_lock", diagnosis.WaitInFile},
	{"flock_lock", diagnosis.WaitInFile},
	{"fcntl_setlk", diagnosis.WaitInFile},
	{"posix_lock", diagnosis.WaitInFile},
	{"poll_schedule", diagnosis.WaitInNetwork},
	{"do_poll", diagnosis.WaitInNetwork},
	{"do_sys_poll", diagnosis.WaitInNetwork},
	{"do_select", diagnosis.WaitInNetwork},
	{"ep_poll", diagnosis.WaitInNetwork},
	{"do_epoll", diagnosis.WaitInNetwork},
	{"wait_woken", diagnosis.WaitInNetwork},
	{"sk_wait", diagnosis.WaitInNetwork},
	{"inet_", diagnosis.WaitInNetwork},
	{"tcp_", diagnosis.WaitInNetwork},
	{"unix_", diagnosis.WaitInNetwork},
	{"__skb_wait", diagnosis.WaitInNetwork},
	{"skb_wait", diagnosis.WaitInNetwork},
}

// inFunction is what the kernel's function of /proc/PID/wchan waits for.
func inFunction(name string) wait {
	for _, f := range functions {
		if strings.HasPrefix(name, f.prefix) {
			return f.wait
		}
	}
	return diagnosis.WaitInUnknown
}
