package record

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"unsafe"
)

// ControlPath is where the control file of the recorder at path is: beside it.
func ControlPath(path string) string { return strings.TrimSuffix(path, Suffix) + ".ctl" }

// SetEvents asks the writer of the recorder at path, which must be one with a Source
// of another library's operations, for a set of events. It looks several times a
// second; Header.EventMask tells what it took. The file is never made here, and one
// that is not a plain file of the recorder's own user is refused.
func SetEvents(path string, set EventSet) error {
	name := ControlPath(path)
	f, err := os.OpenFile(name, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("record: control file: %w", err)
	}
	defer f.Close()
	if set >= numEventSets {
		return fmt.Errorf("record: %s: no such set of events: %d", name, set)
	}
	fi, err := f.Stat()
	if err != nil {
		return fmt.Errorf("record: control file: %w", err)
	}
	owner, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("record: %s: no recorder beside it: %w", name, err)
	}
	if !fi.Mode().IsRegular() || fi.Size() != ControlSize || !sameUser(fi, owner) {
		return fmt.Errorf("record: %s is not a control file of %d bytes that belongs to the recorder's user", name, ControlSize)
	}
	var now [ControlSize]byte
	if _, err := io.ReadFull(f, now[:]); err != nil {
		return fmt.Errorf("record: control file: %w", err)
	}
	at := unsafe.Offsetof(diskControl{}.events)
	version := binary.LittleEndian.Uint32(now[unsafe.Offsetof(diskControl{}.version):])
	if string(now[:len(ControlMagic)]) != ControlMagic || version != ControlVersion {
		return fmt.Errorf("record: %s is not a control file of version %d", name, ControlVersion)
	}
	if binary.LittleEndian.Uint64(now[at:]) == uint64(set) {
		return nil
	}
	if _, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(set)), int64(at)); err != nil {
		return fmt.Errorf("record: control file: %w", err)
	}
	return nil
}

func sameUser(a, b os.FileInfo) bool {
	x, ok := a.Sys().(*syscall.Stat_t)
	y, ok2 := b.Sys().(*syscall.Stat_t)
	return ok && ok2 && x.Uid == y.Uid
}
