package diagnose

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// segments are files that read as one. Files that vanish before they are reached, as
// a master's oldest ones do, are left out.
type segments struct {
	files []*os.File
	sizes []int64
	at    int64
}

func openAll(dir string) (recording, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*"+replay.Suffix))
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	s := &segments{}
	for _, name := range names {
		if strings.HasPrefix(filepath.Base(name), ".") {
			continue
		}
		f, err := os.Open(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			s.files = append(s.files, f)
			var info fs.FileInfo
			if info, err = f.Stat(); err == nil {
				s.sizes = append(s.sizes, info.Size())
			}
		}
		if err != nil {
			s.Close()
			return nil, err
		}
	}
	if len(s.files) == 0 {
		return nil, fmt.Errorf("no recordings (*%s) in this directory", replay.Suffix)
	}
	return s, nil
}

func (s *segments) Read(b []byte) (int, error) {
	at := s.at
	for i, f := range s.files {
		if at >= s.sizes[i] {
			at -= s.sizes[i]
			continue
		}
		n, err := f.ReadAt(b[:min(int64(len(b)), s.sizes[i]-at)], at)
		s.at += int64(n)
		if n > 0 {
			return n, nil
		}
		return n, err
	}
	return 0, io.EOF
}

func (s *segments) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += s.at
	case io.SeekEnd:
		for _, size := range s.sizes {
			offset += size
		}
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning")
	}
	s.at = offset
	return offset, nil
}

func (s *segments) Close() error {
	for _, f := range s.files {
		f.Close()
	}
	return nil
}
