package train

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/fence"
)

// A checkpoint is a directory step-N with one file a rank, and counts from the
// moment that the file `latest` names it: a crash while writing leaves the last one.
const (
	ckptMagic   = "LSCKPT01"
	ckptKeep    = 2 // directories kept
	latestName  = "latest"
	ckptPattern = "step-%08d"
)

func shardPath(dir string, step, rank int) string {
	return filepath.Join(dir, fmt.Sprintf(ckptPattern, step), fmt.Sprintf("rank%d", rank))
}

// files is where checkpoints go. With a fence, nothing that an attempt which is over
// still writes is taken.
type files struct {
	dir   string
	fence *fence.Fence // nil: the launcher has given this attempt no token
}

// openFiles takes the directory for this attempt, before anything is read there.
func openFiles(dir string) (files, error) {
	f, err := fence.FromEnv(dir)
	if errors.Is(err, fence.ErrNone) {
		err = nil
	}
	return files{dir, f}, err
}

// write replaces a file, which is whole and durable when it returns.
func (f files) write(name string, b []byte) error {
	if f.fence != nil {
		return f.fence.WriteFile(name, b)
	}
	path := filepath.Join(f.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return writeDurable(path, b)
}

func (f files) remove(name string) error {
	if f.fence != nil {
		return f.fence.Remove(name)
	}
	return os.RemoveAll(filepath.Join(f.dir, name))
}

// saveShard writes one rank's vectors, durable when it returns.
func saveShard(f files, step, rank int, vectors ...[]float32) error {
	var b bytes.Buffer
	b.WriteString(ckptMagic)
	for _, v := range vectors {
		_ = binary.Write(&b, binary.LittleEndian, uint64(len(v)))
		_ = binary.Write(&b, binary.LittleEndian, v)
	}
	_ = binary.Write(&b, binary.LittleEndian, crc32.ChecksumIEEE(b.Bytes()))
	return f.write(shardPath("", step, rank), b.Bytes())
}

// loadShard reads what saveShard wrote into vectors of the same lengths.
func loadShard(dir string, step, rank int, vectors ...[]float32) error {
	path := shardPath(dir, step, rank)
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	if len(b) < len(ckptMagic)+4 || string(b[:len(ckptMagic)]) != ckptMagic ||
		crc32.ChecksumIEEE(b[:len(b)-4]) != binary.LittleEndian.Uint32(b[len(b)-4:]) {
		return fmt.Errorf("checkpoint %s: damaged (%d bytes)", path, len(b))
	}
	r := bytes.NewReader(b[len(ckptMagic) : len(b)-4])
	for _, v := range vectors {
		var n uint64
		if err := binary.Read(r, binary.LittleEndian, &n); err != nil || n != uint64(len(v)) {
			return fmt.Errorf("checkpoint %s: holds a vector of %d, the model's has %d", path, n, len(v))
		}
		if err := binary.Read(r, binary.LittleEndian, v); err != nil {
			return fmt.Errorf("checkpoint %s: %w", path, err)
		}
	}
	return nil
}

// shards is how many files a checkpoint has.
func shards(dir string, step int) (int, error) {
	files, err := filepath.Glob(filepath.Join(filepath.Dir(shardPath(dir, step, 0)), "rank*"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("checkpoint of step %d in %s has no files", step, dir)
	}
	return len(files), err
}

// commit makes step the checkpoint to restart from, and drops older ones.
func commit(f files, step int) error {
	if err := f.write(latestName, []byte(strconv.Itoa(step)+"\n")); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(f.dir, "step-*"))
	if err != nil {
		return err
	}
	for i := 0; i < len(old)-ckptKeep; i++ { // Glob sorts, and the names sort by step
		if name := filepath.Base(old[i]); name != fmt.Sprintf(ckptPattern, step) {
			if err := f.remove(name); errors.Is(err, fence.ErrHeld) {
				return err
			}
		}
	}
	return nil
}

// Latest returns the step to restart from, 0 when there is no checkpoint.
func Latest(dir string) (int, error) {
	b, err := os.ReadFile(filepath.Join(dir, latestName))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("checkpoint: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 0 {
		return 0, fmt.Errorf("checkpoint: %s holds %.32q, not a step", filepath.Join(dir, latestName), b)
	}
	return n, nil
}

func writeDurable(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("checkpoint: %s: %w", path, err)
	}
	return nil
}
