package record

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
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
