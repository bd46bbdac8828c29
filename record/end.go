package record

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// End is how a rank's process ended, by the word of the one that started and reaped it,
// who alone knows its wait status and what it sent to it. It lies beside the rank's
// recorder, in a file of its own: the recorder is the dead process's, and may not exist.
type End struct {
	Job     string
	Rank    int32
	Attempt uint32
	PID     int32     // of the process that was started; what has the recorder may be a child of it
	Started time.Time // likewise
	Code    int32     // exit status, 0 when a signal ended it
	Signal  int32     // 0 when none did
	Asked   bool      // it had been told to end by the one that tells of it
	At      int64     // when it ended, CLOCK_MONOTONIC ns
}

const (
	// EndSuffix ends the name of every End's file.
	EndSuffix = ".end"
	// endVersion changes when a reader of one version would misunderstand another.
	endVersion = 1
	maxEnd     = 4096 // bytes of a file
	// endSkew is how far the clock may have been set back between a process's start
	// and the creation of its recorder.
	endSkew = 10 * time.Second
)

// diskEnd is an End's file: JSON, since people look at it, too.
type diskEnd struct {
	Version   int    `json:"version"`
	Job       string `json:"job"`
	Rank      int32  `json:"rank"`
	Attempt   uint32 `json:"attempt"`
	BootID    string `json:"boot_id"`
	PID       int32  `json:"pid"`
	StartedNs int64  `json:"started_unix_ns"`
	Code      int32  `json:"code"`
	Signal    int32  `json:"signal"`
	Asked     bool   `json:"asked"`
	MonoNs    int64  `json:"mono_ns"`
}

// WriteEnd writes e into a directory of recorders, mode 0600: whoever can write there
// speaks for the job. The file appears as a whole, and replaces a former one of its rank and attempt.
func WriteEnd(dir string, e End) error {
	fail := func(err error) error {
		return fmt.Errorf("tell how rank %d of job %s ended, in %s: %w", e.Rank, e.Job, dir, err)
	}
	boot, err := bootID()
	if err != nil {
		return fail(err)
	}
	if len(e.Job) >= nameSize {
		e.Job = e.Job[:nameSize-1] // as a recorder has it
	}
	text, err := json.Marshal(diskEnd{
		endVersion, e.Job, e.Rank, e.Attempt, hex.EncodeToString(boot[:]), e.PID, e.Started.UnixNano(), e.Code, e.Signal, e.Asked, e.At,
	})
	if err != nil {
		return fail(err)
	}
	if err := UseDir(dir); err != nil {
		return fail(err)
	}
	f, err := os.CreateTemp(dir, ".new-*") // O_EXCL, 0600
	if err != nil {
		return fail(err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(append(text, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), endPath(dir, e.Job, e.Rank, e.Attempt))
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

func endPath(dir, job string, rank int32, attempt uint32) string {
	return filepath.Join(dir, fmt.Sprintf("%s.%d.%d%s", fileName(job), rank, attempt, EndSuffix))
}

// EndOf reads how the process of the recorder at path, with header h, ended. The error
// is an os.ErrNotExist while nobody has told: there is no file, or it is of another
// process of the rank. A file of another user, but root, is refused.
func EndOf(path string, h Header) (End, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return End{}, fmt.Errorf("end of a process: its recorder: %w", err)
	}
	e, boot, uid, err := readEnd(endPath(filepath.Dir(path), h.Job, h.Rank, h.Attempt))
	if err != nil {
		return End{}, err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); uid != 0 && (!ok || uid != st.Uid) {
		return End{}, fmt.Errorf("end of a process: %s is user %d's, the recorder is not: %w", path, uid, os.ErrPermission)
	}
	if e.Job != h.Job || e.Rank != h.Rank || e.Attempt != h.Attempt || boot != h.BootID || h.Created.Before(e.Started.Add(-endSkew)) {
		return End{}, fmt.Errorf("end of a process: %s: what is told is of another process: %w", path, os.ErrNotExist)
	}
	return e, nil
}

// ReadEnd reads one End's file.
func ReadEnd(path string) (End, error) {
	e, _, _, err := readEnd(path)
	return e, err
}

func readEnd(path string) (e End, boot [16]byte, uid uint32, err error) {
	fail := func(err error) (End, [16]byte, uint32, error) {
		return End{}, boot, 0, fmt.Errorf("end of a process: %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		return fail(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return fail(err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !fi.Mode().IsRegular() || fi.Size() > maxEnd || !ok {
		return fail(fmt.Errorf("%w: no regular file of up to %d bytes", ErrCorrupt, maxEnd))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxEnd))
	if err != nil {
		return fail(err)
	}
	var d diskEnd
	if err := json.Unmarshal(text, &d); err != nil {
		return fail(fmt.Errorf("%w: %w", ErrCorrupt, err))
	}
	if d.Version != endVersion {
		return fail(fmt.Errorf("%w: version %d, this program reads %d", ErrVersion, d.Version, endVersion))
	}
	const maxCode, maxSignal = 255, 64
	id, err := hex.DecodeString(d.BootID)
	if err != nil || copy(boot[:], id) != len(boot) || len(id) > len(boot) || len(d.Job) >= nameSize || d.Rank < 0 || d.Code < 0 || d.Code > maxCode || d.Signal < 0 || d.Signal > maxSignal || d.MonoNs <= 0 {
		return fail(fmt.Errorf("%w: a value is out of range", ErrCorrupt))
	}
	return End{
		Job: d.Job, Rank: d.Rank, Attempt: d.Attempt, PID: d.PID, Started: time.Unix(0, d.StartedNs),
		Code: d.Code, Signal: d.Signal, Asked: d.Asked, At: d.MonoNs,
	}, boot, st.Uid, nil
}

// ListEnds returns the files of Ends in a directory, sorted; none when it does not exist.
func ListEnds(dir string) ([]string, error) { return list(dir, EndSuffix) }

func list(dir, suffix string) ([]string, error) {
	return entries(dir, maxEntries, func(e os.DirEntry) bool { return strings.HasSuffix(e.Name(), suffix) && e.Type().IsRegular() })
}
