package recorder

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"unicode"

	"github.com/lockstep-ccl/lockstep/record"
)

// groupsSuffix ends the name of the file, beside a file of marks, in which a program says
// what its process groups are called (marks/python/lockstep/torch.py).
const groupsSuffix = ".groups"

const (
	maxGroupsFile = 256 << 10
	maxGroups     = 1024
	maxUnnamed    = 8192
)

// group is a process group of the program's framework.
type group struct {
	Name  string `json:"name"`  // by which the framework, and so NCCL, knows it: "3"
	Title string `json:"title"` // for people: "tp"
	Rank  int32  `json:"rank"`  // of the process in it
	Size  int32  `json:"size"`
}

// groups are what one process says, by the file's time.
type groups struct {
	mtime int64
	list  []group
}

// readGroups takes in what the program of a file of marks says of its groups. Only the
// recorder's own user is believed.
func (f *file) readGroups() error {
	path := f.Path + groupsSuffix
	fi, err := os.Lstat(path)
	if err != nil || fi.ModTime().UnixNano() == f.groups.mtime {
		return nil // most programs say nothing
	}
	f.groups = groups{mtime: fi.ModTime().UnixNano()}
	in, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	rec, err := os.Lstat(f.Path)
	if err != nil || !st.Mode().IsRegular() || owner(st) != owner(rec) {
		return fmt.Errorf("%s is not of the user whose recorder is beside it", path)
	}
	b, err := io.ReadAll(io.LimitReader(in, maxGroupsFile))
	if err != nil {
		return err
	}
	var list []group
	if err := json.Unmarshal(b, &list); err != nil {
		return fmt.Errorf("%s holds no list of groups: %w", path, err)
	}
	if len(list) > maxGroups {
		return fmt.Errorf("%s holds %d groups, at most %d are read", path, len(list), maxGroups)
	}
	for i := range list {
		list[i].Title = title(list[i].Title)
	}
	f.groups.list = list
	return nil
}

func owner(fi fs.FileInfo) uint32 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}

// title is a name as recorders may have it.
func title(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
	for len(s) > 63 {
		s = s[:strings.LastIndexFunc(s, func(rune) bool { return true })]
	}
	return s
}

// rename gives communicators the names of their groups: by the name that NCCL was told, or,
// where it was told none, by the only group of that rank and size.
func (g *groups) rename(comms []record.CommStatus) {
	for i := range comms {
		c := &comms[i]
		found, n := "", 0
		for j := range g.list {
			x := &g.list[j]
			if c.Name != "" && c.Name == x.Name && c.Size == x.Size {
				found, n = x.Title, 1
				break
			}
			if c.Name == "" && c.Rank == x.Rank && c.Size == x.Size {
				found = x.Title
				n++
			}
		}
		if n == 1 && found != "" {
			c.Name = found
		}
	}
}

// unnamed are names for communicators that nobody has named, as PyTorch's: by their id.
type unnamed map[uint64]string

// name gives such communicators a name that all their members' agents find alike. It has no
// letters of the id: names that differ by digits only are of communicators that do the same work.
func (u *unnamed) name(comms []record.CommStatus) {
	for i := range comms {
		c := &comms[i]
		if c.Name != "" {
			continue
		}
		name, ok := (*u)[c.ID]
		if !ok {
			if *u == nil || len(*u) >= maxUnnamed {
				*u = unnamed{} // others have come since
			}
			name = fmt.Sprintf("comm-%05d", c.ID%100_000)
			(*u)[c.ID] = name
		}
		c.Name = name
	}
}
