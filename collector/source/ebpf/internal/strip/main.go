// Command strip removes DWARF from BPF objects in place: nothing reads it at run time, and it names
// the compiler's build. It needs no LLVM, so that what is generated depends on clang only.
package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
)

func main() {
	for _, path := range os.Args[1:] {
		if err := strip(path); err != nil {
			fmt.Fprintf(os.Stderr, "strip %s: %v\n", path, err)
			os.Exit(1)
		}
	}
}

func strip(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	out, err := withoutDWARF(raw)
	if err != nil {
		return err
	}
	return os.WriteFile(path, out, 0o644)
}

// debugging reports whether a section is DWARF's, or relocations of that.
func debugging(name string) bool {
	return strings.HasPrefix(strings.TrimPrefix(name, ".rel"), ".debug_")
}

// withoutDWARF lays out the sections that are kept anew. Their numbers change, and with them
// what refers to them: links, relocations' targets and symbols.
func withoutDWARF(raw []byte) ([]byte, error) {
	f, err := elf.NewFile(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	if f.Class != elf.ELFCLASS64 || f.ByteOrder != binary.LittleEndian || f.Type != elf.ET_REL {
		return nil, fmt.Errorf("%v %v %v is no BPF object", f.Class, f.Data, f.Type)
	}
	var h elf.Header64
	le := binary.LittleEndian
	if err := binary.Read(bytes.NewReader(raw), le, &h); err != nil {
		return nil, err
	}
	number := make([]uint32, len(f.Sections)) // new ones; 0 for those that go
	kept := uint32(0)
	for i, s := range f.Sections {
		if i > 0 && !debugging(s.Name) {
			kept++
			number[i] = kept
		}
	}
	var out bytes.Buffer
	out.Write(make([]byte, binary.Size(h)))
	headers := make([]elf.Section64, 1, kept+1)
	for i, s := range f.Sections {
		if number[i] == 0 {
			continue
		}
		var sh elf.Section64
		if err := binary.Read(bytes.NewReader(raw[h.Shoff+uint64(i)*uint64(h.Shentsize):]), le, &sh); err != nil {
			return nil, err
		}
		if int(sh.Link) < len(number) {
			sh.Link = number[sh.Link]
		}
		data := bytes.Clone(raw[sh.Off : sh.Off+sh.Size])
		switch s.Type {
		case elf.SHT_REL:
			sh.Info = number[sh.Info]
		case elf.SHT_SYMTAB:
			for sym := data; len(sym) >= elf.Sym64Size; sym = sym[elf.Sym64Size:] {
				if n := le.Uint16(sym[6:]); int(n) < len(number) {
					le.PutUint16(sym[6:], uint16(number[n])) // of sections that go: undefined
				}
			}
		case elf.SHT_NOBITS:
			data = nil
		}
		for align := max(sh.Addralign, 1); uint64(out.Len())%align != 0; {
			out.WriteByte(0)
		}
		sh.Off = uint64(out.Len())
		out.Write(data)
		headers = append(headers, sh)
	}
	for out.Len()%8 != 0 {
		out.WriteByte(0)
	}
	h.Shoff, h.Shnum, h.Shstrndx = uint64(out.Len()), uint16(len(headers)), uint16(number[h.Shstrndx])
	if err := binary.Write(&out, le, headers); err != nil {
		return nil, err
	}
	var head bytes.Buffer
	if err := binary.Write(&head, le, h); err != nil {
		return nil, err
	}
	copy(out.Bytes(), head.Bytes())
	return out.Bytes(), nil
}
