package ebpf

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// maxMaps bounds what is read of one process's maps.
	maxMaps = 16 << 20
	// maxProcesses bounds the processes that are looked at.
	maxProcesses = 1 << 16
	// maxFiles bounds the files of which it is remembered what they are.
	maxFiles = 4096
	// tryAgain is the time between two attempts to attach to a library that cannot be.
	tryAgain = 10 * time.Second
)

// scanner finds the processes that have NCCL mapped. To read a process's maps takes its
// address space's lock, so that is done only when its size has changed.
type scanner struct {
	proc string
	// attach puts probes on a library by a path that this program opens it by, when there are none yet.
	attach func(path string) (libraryID, error)
	known  map[int]*seen
	files  map[string]libraryOrNot // by what identifies a mapped file
	err    error                   // of the last file that should have been attached to and was not
}

// seen is a process as the scanner knows it.
type seen struct {
	size    string    // of its address space, when its maps were read last
	library libraryID // that it has mapped; zero while it has none
}

// libraryOrNot is what is known of a mapped file.
type libraryOrNot struct {
	id    libraryID
	err   error
	again time.Time // when to try again; zero for never
}

func newScanner(proc string, attach func(path string) (libraryID, error)) *scanner {
	return &scanner{proc: proc, attach: attach, known: map[int]*seen{}, files: map[string]libraryOrNot{}}
}

// forget makes the scanner attach again when a library is met.
func (s *scanner) forget(id libraryID) {
	for key, f := range s.files {
		if f.id == id {
			delete(s.files, key)
		}
	}
	for _, p := range s.known {
		if p.library == id {
			*p = seen{}
		}
	}
}

// scan returns which processes have which library now.
func (s *scanner) scan() (using map[int]libraryID, err error) {
	dir, err := os.Open(s.proc)
	if err != nil {
		return nil, fmt.Errorf("processes: %w", err)
	}
	names, err := dir.Readdirnames(-1)
	dir.Close()
	if err != nil {
		return nil, fmt.Errorf("processes: %w", err)
	}
	using = map[int]libraryID{}
	here := map[int]bool{}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || len(here) >= maxProcesses {
			continue
		}
		here[pid] = true
		text, err := os.ReadFile(filepath.Join(s.proc, name, "statm"))
		size, _, _ := strings.Cut(string(text), " ")
		if err != nil || size == "0" || size == "" { // it is gone, or the kernel's
			continue
		}
		p := s.known[pid]
		if p == nil {
			p = &seen{}
			s.known[pid] = p
		}
		if p.size != size {
			p.size = size
			if id := s.look(pid); id != (libraryID{}) {
				p.library = id
			}
		}
		if p.library != (libraryID{}) {
			using[pid] = p.library
		}
	}
	for pid := range s.known {
		if !here[pid] {
			delete(s.known, pid)
		}
	}
	if len(s.files) > maxFiles {
		clear(s.files)
	}
	return using, nil
}

// look reads a process's maps for the library that it has.
func (s *scanner) look(pid int) (id libraryID) {
	dir := filepath.Join(s.proc, strconv.Itoa(pid))
	maps, err := os.Open(filepath.Join(dir, "maps"))
	if err != nil {
		return id // it is gone, or not ours to see
	}
	defer maps.Close()
	lines := bufio.NewScanner(maps)
	lines.Buffer(make([]byte, 4096), 64<<10)
	read, cuda := 0, false
	for lines.Scan() {
		line := lines.Bytes()
		if read += len(line); read > maxMaps {
			break
		}
		at := bytes.IndexByte(line, '/')
		if at < 0 {
			continue
		}
		path := string(line[at:])
		cuda = cuda || strings.Contains(path, "/libcuda.so")
		fields := bytes.Fields(line[:at]) // address, permissions, offset, device, inode
		if len(fields) < 5 || bytes.IndexByte(fields[1], 'x') < 0 || !mayHaveNCCL(path) {
			continue
		}
		name, deleted := strings.CutSuffix(path, " (deleted)")
		paths := []string{filepath.Join(dir, "root", name), filepath.Join(dir, "map_files", string(fields[0]))}
		if deleted {
			slices.Reverse(paths)
			if !hasInode(paths[1], string(fields[4])) {
				paths = paths[:1] // another file has the name by now
			}
		}
		id = s.file(string(fields[3])+" "+string(fields[4]), paths...)
		if id != (libraryID{}) {
			return id
		}
	}
	if exe := filepath.Join(dir, "exe"); cuda { // it may be linked statically
		if fi, err := os.Stat(exe); err == nil {
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				return s.file(fmt.Sprint("exe ", st.Dev, " ", st.Ino), exe)
			}
		}
	}
	return id
}

// hasInode reports whether a file has this number. NFS calls files deleted that are there.
func hasInode(path, inode string) bool {
	fi, err := os.Stat(path)
	if err != nil {
		return false
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && strconv.FormatUint(st.Ino, 10) == inode
}

// file attaches to a mapped file by the first of the paths that works, once for each file.
func (s *scanner) file(key string, paths ...string) libraryID {
	if was, ok := s.files[key]; ok && (was.err == nil || was.again.IsZero() || time.Now().Before(was.again)) {
		return was.id
	}
	var f libraryOrNot
	for _, path := range paths {
		if f.id, f.err = s.attach(path); f.err == nil {
			break
		}
	}
	switch {
	case f.err == nil:
		s.err = nil
	case errors.Is(f.err, ErrNotLibrary):
		f.id = libraryID{}
	default:
		f.id, f.again, s.err = libraryID{}, time.Now().Add(tryAgain), f.err
	}
	s.files[key] = f
	return f.id
}
