package fence

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Stage returns where a file or a directory of that name, relative to the checkpoint
// directory, is to be written before it is published. The directories above it are there.
func (f *Fence) Stage(name string) (string, error) {
	if err := f.name(name); err != nil {
		return "", err
	}
	if dir := filepath.Dir(name); dir != "." {
		at := f.stage // which itself is never made again
		for part := range strings.SplitSeq(dir, string(filepath.Separator)) {
			at = filepath.Join(at, part)
			if err := os.Mkdir(at, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
				return "", f.told("stage", name, err)
			}
		}
	}
	return filepath.Join(f.stage, name), nil
}

func (f *Fence) name(name string) error {
	if !filepath.IsLocal(name) || filepath.Clean(name) != name || name == "." || strings.Split(name, string(filepath.Separator))[0] == dirName {
		return fmt.Errorf("fence: %q: want a path inside the checkpoint directory", name)
	}
	return nil
}

// told is an error, or what it comes from: a later attempt has taken the stage away.
func (f *Fence) told(what, name string, err error) error {
	var held *HeldError
	if errors.As(f.Check(), &held) {
		return held
	}
	return fmt.Errorf("fence: %s %s: %w", what, filepath.Join(f.dir, name), err)
}

// Publish moves what was staged under a name to its place, at once and for good: it is there
// when Publish returns, unless the error says that it is not. A directory takes the place of
// one that is there. Whoever writes a staged file syncs it; File does.
func (f *Fence) Publish(name string) error {
	if err := f.name(name); err != nil {
		return err
	}
	if err := f.Check(); err != nil {
		return err
	}
	from, to := filepath.Join(f.stage, name), filepath.Join(f.dir, name)
	if err := os.MkdirAll(filepath.Dir(to), 0o777); err != nil {
		return f.told("publish", name, err)
	}
	f.between()
	err := os.Rename(from, to)
	if errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.EISDIR) || errors.Is(err, syscall.ENOTDIR) {
		err = f.exchange(name, from, to)
	}
	if err == nil {
		err = syncDir(filepath.Dir(to))
	}
	if err != nil {
		return f.told("publish", name, err)
	}
	return nil
}

// exchange publishes where a directory is in the way.
func (f *Fence) exchange(name, from, to string) error {
	f.between()
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	if err == nil {
		return removeAll(from)
	}
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	// A file system that cannot: for a moment there is neither.
	if err := f.takeAway(name); err != nil {
		return err
	}
	f.between()
	return os.Rename(from, to)
}

// Remove removes a file or directory of the checkpoint directory. One that is not there is
// no error.
func (f *Fence) Remove(name string) error {
	if err := f.name(name); err != nil {
		return err
	}
	if err := f.Check(); err != nil {
		return err
	}
	if err := f.takeAway(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return f.told("remove", name, err)
	}
	return f.Check() // or it was not this attempt's to say that it is gone
}

// takeAway moves a name into the stage, which only the holder can, and removes it there.
func (f *Fence) takeAway(name string) error {
	f.between()
	gone := filepath.Join(f.stage, ".gone-"+strconv.FormatUint(rand.Uint64(), 16))
	if err := os.Rename(filepath.Join(f.dir, name), gone); err != nil {
		return err
	}
	return removeAll(gone)
}

// File is a file that is written aside, and appears whole with Commit.
type File struct {
	*os.File
	f    *Fence
	name string
	over bool
}

// Create begins a file of that name, relative to the checkpoint directory. Ranks
// write files of different names.
func (f *Fence) Create(name string) (*File, error) {
	if err := f.Check(); err != nil {
		return nil, err
	}
	path, err := f.Stage(name)
	if err != nil {
		return nil, err
	}
	f.between()
	file, err := os.Create(path)
	if err != nil {
		return nil, f.told("create", name, err)
	}
	return &File{File: file, f: f, name: name}, nil
}

// Commit makes the file durable and publishes it.
func (w *File) Commit() error {
	if w.over {
		return fmt.Errorf("fence: %s: %w", w.name, os.ErrClosed)
	}
	w.over = true
	if err := errors.Join(w.File.Sync(), w.File.Close()); err != nil {
		_ = os.Remove(w.File.Name())
		return w.f.told("write", w.name, err)
	}
	return w.f.Publish(w.name)
}

// Close gives a file up that was not committed; after Commit it does nothing.
func (w *File) Close() error {
	if w.over {
		return nil
	}
	w.over = true
	return errors.Join(w.File.Close(), os.Remove(w.File.Name()))
}

// WriteFile replaces a small file as a whole.
func (f *Fence) WriteFile(name string, b []byte) error {
	w, err := f.Create(name)
	if err != nil {
		return err
	}
	defer w.Close()
	if _, err := w.Write(b); err != nil {
		return f.told("write", name, err)
	}
	return w.Commit()
}
