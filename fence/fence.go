package fence

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ErrHeld says that a later attempt has the directory. Errors that wrap it are *HeldError.
var ErrHeld = errors.New("a later attempt holds it")

// HeldError says who has the directory.
type HeldError struct {
	Dir    string
	Mine   Token
	Holder Claim
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("checkpoint directory %s is attempt %d's since %s (made by process %d on %s), this is attempt %d: %v, and nothing more is written there. Where that attempt is no more and its clock was ahead, remove %s",
		e.Dir, e.Holder.Attempt, e.Holder.At.Format(time.RFC3339), e.Holder.PID, e.Holder.Node, e.Mine.Attempt, ErrHeld, filepath.Join(e.Dir, dirName))
}

func (e *HeldError) Unwrap() error { return ErrHeld }

// Claim is an attempt's word that a directory is its own.
type Claim struct {
	Version    int       `json:"version"`
	Generation uint64    `json:"generation"`
	Attempt    int       `json:"attempt"`
	Key        string    `json:"key"` // of its token, which it does not tell
	Job        string    `json:"job,omitempty"`
	Node       string    `json:"node"`
	PID        int       `json:"pid"` // of the rank that came first
	At         time.Time `json:"at"`
}

const (
	claimVersion = 1
	dirName      = ".lockstep-fence"
	claimPrefix  = "claim."
	stagePrefix  = "stage."
	deadPrefix   = "dead."
	tmpPrefix    = ".new-"
	maxClaim     = 4 << 10
	keepClaims   = 256 // older ones go, with what is in the places of their stages
	maxTries     = 100
)

// Fence is one rank's hold on a directory. Safe for concurrent use. It has no goroutine
// and no open file: there is nothing to close.
type Fence struct {
	dir   string // of the checkpoints, absolute
	in    string // dir/.lockstep-fence
	stage string
	token Token
	step  func() // between what the file system is asked for; a test's, else nil
}

func (f *Fence) between() {
	if f.step != nil {
		f.step()
	}
}

// FromEnv is Open with the token of the environment; ErrNone where there is none.
func FromEnv(dir string) (*Fence, error) {
	t, err := TokenFromEnv()
	if err != nil {
		return nil, err
	}
	return Open(dir, t)
}

// Open takes dir, which it makes when it is missing, for an attempt: all its ranks may,
// and what earlier ones have not published by then never will be. Where a later attempt
// has it, the error is a *HeldError.
func Open(dir string, t Token) (*Fence, error) { return open(dir, t, nil) }

func open(dir string, t Token, step func()) (*Fence, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("fence: %s: %w", dir, err)
	}
	if _, err := Parse(t.String()); err != nil {
		return nil, err
	}
	f := &Fence{dir: abs, in: filepath.Join(abs, dirName), token: t, step: step}
	f.stage = filepath.Join(f.in, stageName(t.Generation))
	if err := f.open(); err != nil {
		var held *HeldError
		if errors.As(err, &held) {
			return nil, held
		}
		return nil, fmt.Errorf("fence: take %s for attempt %d: %w", abs, t.Attempt, err)
	}
	return f, nil
}

func (f *Fence) open() error {
	if err := os.MkdirAll(f.in, 0o777); err != nil {
		return err
	}
	// The stage is there before the claim: whoever has a higher claim and does not see the
	// stage made its claim before this one looks for it.
	switch err := os.Mkdir(f.stage, 0o777); {
	case err == nil:
	case !errors.Is(err, fs.ErrExist):
		return err
	default:
		if fi, err := os.Lstat(f.stage); err == nil && !fi.IsDir() {
			if err := f.Check(); err != nil {
				return err
			}
			return fmt.Errorf("%s is in the place of this attempt's stage, and no later attempt's claim is there: remove %s", f.stage, f.in)
		}
	}
	f.between()
	if err := f.claim(); err != nil {
		return err
	}
	f.between()
	if err := f.Check(); err != nil {
		_ = os.RemoveAll(f.stage)
		return err
	}
	f.between()
	if err := f.fence(); err != nil {
		return err
	}
	f.between()
	// One that came between the look and the fence has fenced this one.
	return f.Check()
}

func claimName(g uint64) string { return fmt.Sprintf("%s%020d", claimPrefix, g) }
func stageName(g uint64) string { return fmt.Sprintf("%s%020d", stagePrefix, g) }

// generation is the inverse of claimName and stageName.
func generation(name, prefix string) (uint64, bool) {
	digits, ok := strings.CutPrefix(name, prefix)
	g, err := strconv.ParseUint(digits, 10, 64)
	return g, ok && len(digits) == 20 && err == nil
}

// claim writes this attempt's claim, unless another rank of it has.
func (f *Fence) claim() error {
	node, _ := os.Hostname()
	b, err := json.Marshal(Claim{
		Version: claimVersion, Generation: f.token.Generation, Attempt: f.token.Attempt, Key: f.token.key(),
		Job: os.Getenv("LOCKSTEP_JOB"), Node: node, PID: os.Getpid(), At: time.Now().UTC(),
	})
	if err != nil {
		return err
	}
	tmp, err := writeNew(f.in, b)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	path := filepath.Join(f.in, claimName(f.token.Generation))
	err = os.Link(tmp, path) // whole from the moment that it is there
	if errors.Is(err, fs.ErrExist) {
		c, err := readClaim(path)
		if err == nil && (c.Key != f.token.key() || c.Attempt != f.token.Attempt) {
			err = &HeldError{f.dir, f.token, *c} // of the same moment: who came first has it
		}
		return err
	}
	if err == nil {
		err = syncDir(f.in)
	}
	return err
}

// Claims are the attempts that have held the directory, the holder last.
func Claims(dir string) ([]Claim, error) {
	in := filepath.Join(dir, dirName)
	all, err := generations(in, claimPrefix)
	if err != nil {
		return nil, fmt.Errorf("fence: %s: %w", dir, err)
	}
	var claims []Claim
	for _, g := range all {
		c, err := readClaim(filepath.Join(in, claimName(g)))
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has just been dropped
		}
		if err != nil {
			return nil, fmt.Errorf("fence: %w", err)
		}
		claims = append(claims, *c)
	}
	return claims, nil
}

func readClaim(path string) (*Claim, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxClaim {
		return nil, fmt.Errorf("%s is no claim: %v, %d bytes", path, fi.Mode(), fi.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseClaim(path, b)
}

func parseClaim(path string, b []byte) (*Claim, error) {
	c := new(Claim)
	if err := json.Unmarshal(b, c); err != nil {
		return nil, fmt.Errorf("%s is no claim: %w", path, err)
	}
	if c.Version != claimVersion {
		return nil, fmt.Errorf("%s is of version %d, this program knows %d", path, c.Version, claimVersion)
	}
	return c, nil
}

// generations lists those of a kind, lowest first.
func generations(in, prefix string) ([]uint64, error) {
	entries, err := os.ReadDir(in)
	if err != nil {
		return nil, err
	}
	var all []uint64
	for _, e := range entries {
		if g, ok := generation(e.Name(), prefix); ok {
			all = append(all, g)
		}
	}
	slices.Sort(all)
	return all, nil
}

// Check returns a *HeldError once a later attempt has the directory. It costs one listing
// of a small directory: writers that go around the fence ask before each checkpoint.
func (f *Fence) Check() error {
	all, err := generations(f.in, claimPrefix)
	if err != nil {
		return fmt.Errorf("fence: %s: %w", f.dir, err)
	}
	if n := len(all); n > 0 && all[n-1] > f.token.Generation {
		c, err := readClaim(filepath.Join(f.in, claimName(all[n-1])))
		if err != nil { // it is there: what it says matters less
			c = &Claim{Generation: all[n-1], Attempt: -1, Node: "unknown"}
		}
		return &HeldError{f.dir, f.token, *c}
	}
	return nil
}

// Token is the attempt's.
func (f *Fence) Token() Token { return f.token }

// Dir is the directory that is fenced.
func (f *Fence) Dir() string { return f.dir }

// fence takes earlier attempts' stages away.
func (f *Fence) fence() error {
	stages, err := generations(f.in, stagePrefix)
	if err != nil {
		return err
	}
	for _, g := range stages {
		if g < f.token.Generation {
			f.between()
			if err := f.bury(filepath.Join(f.in, stageName(g))); err != nil {
				return err
			}
		}
	}
	f.clean()
	return nil
}

// bury puts a file in a stage's place, which nobody makes a directory over.
func (f *Fence) bury(stage string) error {
	for range maxTries {
		if fi, err := os.Lstat(stage); err == nil && !fi.IsDir() {
			return nil
		}
		dead := filepath.Join(f.in, deadPrefix+strconv.FormatUint(rand.Uint64(), 16))
		if err := os.Rename(stage, dead); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f.between()
		file, err := os.OpenFile(stage, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o444)
		if err == nil {
			err = errors.Join(file.Close(), syncDir(f.in))
		}
		f.between()
		// Also where a client has kept the directory's handle: what is in it goes.
		if e := removeAll(dead); e != nil {
			return e
		}
		if err == nil {
			return nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		// Somebody has buried it, or its attempt has made it again: look.
	}
	return fmt.Errorf("%s comes back again and again: something goes on writing there", stage)
}

// removeAll is os.RemoveAll, again while somebody adds to it.
func removeAll(path string) (err error) {
	for range maxTries {
		if err = os.RemoveAll(path); err == nil || !errors.Is(err, syscall.ENOTEMPTY) {
			return err
		}
	}
	return err
}

// clean drops what nobody needs any more.
func (f *Fence) clean() {
	entries, err := os.ReadDir(f.in)
	if err != nil {
		return
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), deadPrefix) {
			_ = os.RemoveAll(filepath.Join(f.in, e.Name()))
		}
	}
	claims, err := generations(f.in, claimPrefix)
	if err != nil || len(claims) <= keepClaims {
		return
	}
	for _, g := range claims[:len(claims)-keepClaims] {
		_ = os.Remove(filepath.Join(f.in, claimName(g)))
		_ = os.Remove(filepath.Join(f.in, stageName(g)))
	}
}

func writeNew(dir string, b []byte) (path string, err error) {
	file, err := os.CreateTemp(dir, tmpPrefix)
	if err != nil {
		return "", err
	}
	_, err = file.Write(b)
	if err == nil {
		err = file.Chmod(0o644)
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		_ = os.Remove(file.Name())
		return "", err
	}
	return file.Name(), nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) { // some file systems have nothing to sync
		return err
	}
	return nil
}
