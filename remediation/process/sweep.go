package process

import (
	"bytes"
	"os"
	"strconv"
)

// sweep kills what former attempts, or a former supervisor that was killed
// itself, have left running outside their process groups: it could hold the
// devices of the next attempt, or write into its checkpoints. Such a process
// is known by the secret's path in its environment, which only the ranks of
// this directory get, and what they start. It returns how many there were.
func (w *crew) sweep(secret string) (found int) {
	mark := []byte("\x00" + secretVar + "=" + secret + "\x00")
	dirs, err := os.ReadDir("/proc")
	if err != nil {
		w.o.Logger.Warn("cannot look for what former attempts left running", "err", err)
		return 0
	}
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		p, err := os.FindProcess(pid) // a handle first: the kill must not reach the pid's next owner
		if err != nil {
			continue
		}
		env, err := os.ReadFile("/proc/" + d.Name() + "/environ")
		if err == nil && bytes.Contains(append([]byte{0}, env...), mark) {
			found++
			if p.Kill() == nil {
				w.o.Logger.Warn("killed what a former attempt had left running", "job", w.o.Job, "pid", pid)
			}
		}
		_ = p.Release()
	}
	return found
}
