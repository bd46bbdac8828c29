package record

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// bootID is the kernel's id of this boot: a pid and start time mean something
// only together with it.
func bootID() ([16]byte, error) {
	const path = "/proc/sys/kernel/random/boot_id"
	var id [16]byte
	text, err := os.ReadFile(path)
	if err != nil {
		return id, fmt.Errorf("boot id: %w", err)
	}
	digits := bytes.ReplaceAll(bytes.TrimSpace(text), []byte("-"), nil)
	if n, err := hex.Decode(id[:], digits[:min(len(digits), 2*len(id))]); err != nil || n != len(id) {
		return id, fmt.Errorf("boot id: %s holds %q, not a UUID", path, text)
	}
	return id, nil
}

// processStart returns field 22 of /proc/PID/stat: when the process started,
// in clock ticks since boot. dead is true for a zombie.
func processStart(pid int) (start uint64, dead bool, err error) {
	path := fmt.Sprintf("/proc/%d/stat", pid)
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, errors.Is(err, os.ErrNotExist), fmt.Errorf("process start: %w", err)
	}
	// The command name, field 2, is in parentheses and may hold anything.
	_, rest, ok := bytes.Cut(text[max(0, bytes.LastIndexByte(text, ')')):], []byte(") "))
	fields := bytes.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, false, fmt.Errorf("process start: %s has %d fields", path, len(fields))
	}
	start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return 0, false, fmt.Errorf("process start: %s: %w", path, err)
	}
	state := fields[0][0]
	return start, state == 'Z' || state == 'X', nil
}

// processInside finds a living process by its start and by the pid that it has in
// a namespace of its own: the last of NSpid in /proc/PID/status (proc(5)).
func processInside(inner int, start uint64) (pid int, ok bool) {
	names, _ := filepath.Glob("/proc/[1-9]*") // the pattern is well-formed
	for _, name := range names {
		pid, err := strconv.Atoi(filepath.Base(name))
		if err != nil {
			continue
		}
		if s, dead, err := processStart(pid); err != nil || dead || s != start {
			continue
		}
		status, _ := os.ReadFile(filepath.Join(name, "status")) // it may have ended just now
		for line := range bytes.Lines(status) {
			pids, found := bytes.CutPrefix(line, []byte("NSpid:"))
			if f := bytes.Fields(pids); found && len(f) > 1 && string(f[len(f)-1]) == strconv.Itoa(inner) {
				return pid, true
			}
		}
	}
	return 0, false
}
