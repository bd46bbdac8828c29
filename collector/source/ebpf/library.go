package ebpf

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// ErrNotLibrary is of a file that has none of NCCL's functions.
var ErrNotLibrary = errors.New("it has none of NCCL's functions")

const (
	// maxSymbols bounds the symbol tables that are read: libtorch_cuda has some 10 MiB of them.
	maxSymbols = 256 << 20
)

// libraryID identifies a file's content for the kernel: probes are on inodes.
type libraryID struct {
	dev, inode uint64
}

// namesOfLibraries begin the names of files that have NCCL in them: itself, AMD's, and what links
// it statically.
var namesOfLibraries = []string{"libnccl.so", "librccl.so", "libtorch_cuda", "libtorch_hip", "libnccl_static", "libpynccl", "xla_extension", "libtensorflow_cc"}

// mayHaveNCCL reports whether a mapped file is worth a look.
func mayHaveNCCL(path string) bool {
	name := filepath.Base(path)
	return slices.ContainsFunc(namesOfLibraries, func(s string) bool { return strings.HasPrefix(name, s) })
}

// open opens a file that a process has mapped. Probes are put on what is open here, not on
// what has the name by then: that is the process's to change.
func open(path string) (*os.File, libraryID, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, libraryID{}, fmt.Errorf("library: %w", err)
	}
	fi, err := file.Stat()
	if err == nil {
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && fi.Mode().IsRegular() {
			return file, libraryID{st.Dev, st.Ino}, nil
		}
		err = ErrNotLibrary
	}
	file.Close()
	return nil, libraryID{}, fmt.Errorf("library %s: %w", path, err)
}

// symbols finds the file offsets of NCCL's functions in an ELF file. The file is some
// process's own: whatever is in it gives an error, never a crash.
func symbols(file io.ReaderAt) (offsets map[string]uint64, err error) {
	defer func() {
		if p := recover(); p != nil { // debug/elf is not proof against all files
			err = fmt.Errorf("symbols: %w: %v", ErrNotLibrary, p)
		}
	}()
	f, err := elf.NewFile(file)
	if err != nil {
		return nil, fmt.Errorf("symbols: %w: %w", ErrNotLibrary, err)
	}
	defer f.Close()
	offsets = map[string]uint64{}
	wanted := map[string]bool{}
	for i := range functions {
		wanted[functions[i].name] = true
	}
	if tooMany(f) {
		return nil, fmt.Errorf("symbols: %w: more than %d bytes of them", ErrNotLibrary, maxSymbols)
	}
	for _, read := range []func() ([]elf.Symbol, error){f.DynamicSymbols, f.Symbols} {
		table, err := read()
		if err != nil && !errors.Is(err, elf.ErrNoSymbols) {
			return nil, fmt.Errorf("symbols: %w: %w", ErrNotLibrary, err)
		}
		for _, s := range table {
			if wanted[s.Name] && elf.ST_TYPE(s.Info) == elf.STT_FUNC && s.Section != elf.SHN_UNDEF {
				if off, ok := offset(f, s.Value); ok {
					offsets[s.Name] = off
				}
			}
		}
		if _, ok := offsets[marker]; ok {
			return offsets, nil
		}
	}
	return nil, fmt.Errorf("symbols: %w", ErrNotLibrary)
}

func tooMany(f *elf.File) bool {
	size := uint64(0)
	for _, s := range f.Sections {
		switch s.Type {
		case elf.SHT_SYMTAB, elf.SHT_DYNSYM, elf.SHT_STRTAB:
			size += s.Size
		}
	}
	return size > maxSymbols
}

// offset is where in the file an address is.
func offset(f *elf.File, address uint64) (uint64, bool) {
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 && address >= p.Vaddr && address-p.Vaddr < p.Filesz {
			return address - p.Vaddr + p.Off, true
		}
	}
	return 0, false
}
