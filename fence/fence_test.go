package fence

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

func token(g uint64) Token {
	t := New(int(g), 0)
	t.Generation = g
	return t
}

func mustOpen(t testing.TB, dir string, tok Token) *Fence {
	t.Helper()
	f, err := Open(dir, tok)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// memory is a directory where nothing waits for a disk.
func memory(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "lockstep-fence-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// published is what the directory holds, by name.
func published(t interface{ Fatal(...any) }, dir string) map[string]string {
	m := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == dirName:
			return filepath.SkipDir
		case d.IsDir():
			return nil
		}
		b, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		m[name] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestOneAttempt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ckpt")
	tok := New(3, 0)
	var fences []*Fence
	for range 4 { // its ranks
		fences = append(fences, mustOpen(t, dir, tok))
	}
	for r, f := range fences {
		w, err := f.Create(fmt.Sprintf("step-10/rank%d", r))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(w, "weights %d", r)
		if len(published(t, dir)) != r {
			t.Errorf("%v is seen before it is committed", published(t, dir))
		}
		if err := errors.Join(w.Commit(), w.Close()); err != nil {
			t.Fatal(err)
		}
		if err := w.Commit(); err == nil {
			t.Error("committed twice")
		}
	}
	for _, v := range []string{"10", "20"} {
		if err := fences[0].WriteFile("latest", []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(fences[1].Remove("step-10"), fences[2].Remove("step-10")); err != nil {
		t.Fatal(err)
	}
	if got := published(t, dir); len(got) != 1 || got["latest"] != "20" {
		t.Errorf("%v", got)
	}
	for _, bad := range []string{"", ".", "..", "../x", "/x", "a/../b", dirName, dirName + "/claim.1", "a//b"} {
		if err := fences[0].WriteFile(bad, nil); err == nil {
			t.Errorf("%q is written", bad)
		}
	}
	w, err := fences[0].Create("given up")
	if err == nil {
		err = w.Close()
	}
	if left, _ := os.ReadDir(fences[0].stage); err != nil || len(left) != 1 { // step-10
		t.Errorf("%v, %v", err, left)
	}
	claims, err := Claims(dir)
	if err != nil || len(claims) != 1 || claims[0].Attempt != 3 || claims[0].PID != os.Getpid() {
		t.Errorf("%+v, %v", claims, err)
	}
}

func TestDirectories(t *testing.T) {
	f := mustOpen(t, t.TempDir(), New(0, 0))
	for _, v := range []string{"a", "b"} { // the second takes the first one's place
		at, err := f.Stage("deep/step-5")
		if err == nil {
			err = os.Mkdir(at, 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(at, "w"+v), []byte(v), 0o600)
		}
		if err == nil {
			err = f.Publish("deep/step-5")
		}
		if got := published(t, f.dir); err != nil || len(got) != 1 || got["deep/step-5/w"+v] != v {
			t.Fatalf("%v, %v", got, err)
		}
	}
	if err := f.WriteFile("deep", nil); err == nil || len(published(t, f.dir)) != 0 {
		_ = err // a file in a directory's place: either way nothing is half there
	}
}

func TestALaterAttempt(t *testing.T) {
	dir := t.TempDir()
	old := mustOpen(t, dir, token(6))
	w, err := old.Create("step-10/rank0") // it is cut off here
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, "old")
	later := mustOpen(t, dir, token(7))
	if err := later.WriteFile("latest", []byte("new")); err != nil {
		t.Fatal(err)
	}
	// ... and comes back.
	fmt.Fprint(w, "more")
	held := func(what string, err error) {
		t.Helper()
		var h *HeldError
		if !errors.As(err, &h) || !errors.Is(err, ErrHeld) || h.Holder.Attempt != 7 || h.Mine.Attempt > 6 {
			t.Errorf("%s: %v", what, err)
		}
	}
	held("commit", w.Commit())
	held("check", old.Check())
	held("write", old.WriteFile("latest", []byte("old")))
	held("remove", old.Remove("latest"))
	held("publish", old.Publish("step-10"))
	_, err = old.Create("x")
	held("create", err)
	_, err = Open(dir, old.Token())
	held("open", err)
	_, err = Open(dir, token(3))
	held("open of one that never was there", err)
	_, err = Open(dir, token(7)) // a second supervisor's
	held7 := &HeldError{}
	if !errors.As(err, &held7) {
		t.Errorf("another attempt of the same generation: %v", err)
	}
	// A program that makes its directories itself does not bring the stage back.
	if err := os.MkdirAll(filepath.Join(old.stage, "step-11"), 0o755); err == nil {
		t.Error("an old stage is there again")
	}
	if got := published(t, dir); len(got) != 1 || got["latest"] != "new" {
		t.Errorf("%v", got)
	}
	if err := later.Check(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(old.Check().Error(), "is attempt 7's since") {
		t.Error(old.Check())
	}
}

// actor is an attempt whose every step waits to be told.
type actor struct {
	ready, step chan struct{}
	over        bool
}

func (a *actor) wait() { a.ready <- struct{}{}; <-a.step }

// TestEveryInterleaving: attempts open, write, publish and remove, one step of one of them at a
// time, in any order. Once Open of one has returned, nothing of an earlier one appears
// or goes.
func TestEveryInterleaving(t *testing.T) {
	base := memory(t)
	var round atomic.Int64
	rapid.Check(t, func(t *rapid.T) {
		dir := filepath.Join(base, fmt.Sprint(round.Add(1)))
		defer os.RemoveAll(dir)
		attempts := rapid.IntRange(2, 3).Draw(t, "attempts")
		var actors []*actor
		var all sync.WaitGroup
		var failed atomic.Pointer[string]
		fail := func(format string, args ...any) {
			s := fmt.Sprintf(format, args...)
			failed.CompareAndSwap(nil, &s)
		}
		opened := 0 // the latest attempt whose Open has returned: one actor runs at a time
		var seen map[string]string
		for g := 1; g <= attempts; g++ {
			a := &actor{ready: make(chan struct{}), step: make(chan struct{})}
			actors = append(actors, a)
			plan := rapid.SliceOfN(rapid.IntRange(0, 3), 1, 4).Draw(t, "plan")
			all.Go(func() {
				defer close(a.ready)
				a.wait()
				f, err := open(dir, token(uint64(g)), a.wait)
				if err != nil {
					if !errors.Is(err, ErrHeld) {
						fail("open %d: %v", g, err)
					}
					return
				}
				if g < opened {
					fail("attempt %d got the directory after attempt %d had it", g, opened)
				}
				opened, seen = g, published(t, dir)
				for i, what := range plan {
					a.wait()
					before := opened
					switch what {
					case 0:
						err = f.WriteFile("latest", []byte(fmt.Sprint(g)))
					case 1:
						err = f.WriteFile(fmt.Sprintf("step-%d/rank", i), []byte(fmt.Sprint(g)))
					case 2:
						err = f.Remove("latest")
					case 3:
						var at string
						if at, err = f.Stage("dir"); err == nil {
							a.wait()
							err = errors.Join(os.MkdirAll(at, 0o755), os.WriteFile(filepath.Join(at, "file"), []byte(fmt.Sprint(g)), 0o600))
						}
						if err == nil {
							err = f.Publish("dir")
						}
					}
					if err == nil && before > g {
						fail("attempt %d did %d after attempt %d had the directory", g, what, before)
					}
					if err != nil && opened == g && f.Check() == nil {
						fail("attempt %d, which holds it: %v", g, err)
					}
				}
			})
		}
		var pick *actor
		for burst := 0; ; {
			var ready []*actor
			for _, a := range actors {
				if !a.over {
					if _, ok := <-a.ready; !ok {
						a.over = true
						continue
					}
					ready = append(ready, a)
				}
			}
			if len(ready) == 0 {
				break
			}
			// In bursts: a whole Open fits between two steps of another one.
			if burst--; burst < 0 || !slices.Contains(ready, pick) {
				pick, burst = ready[rapid.IntRange(0, len(ready)-1).Draw(t, "who")], rapid.IntRange(0, 20).Draw(t, "burst")
			}
			for _, a := range ready {
				if a != pick {
					go func() { a.ready <- struct{}{} }() // it is still ready
				}
			}
			was, had := opened, maps.Clone(seen)
			pick.step <- struct{}{}
			// Until it is ready again, or over, it runs alone.
			if _, ok := <-pick.ready; ok {
				go func() { pick.ready <- struct{}{} }()
			} else {
				pick.over = true
			}
			if was > 0 {
				now := published(t, dir)
				mine := slices.Index(actors, pick) + 1
				if mine < was && opened == was && !maps.Equal(now, had) {
					fail("attempt %d changed %v to %v while attempt %d had the directory", mine, had, now, was)
				}
				seen = now
			}
		}
		all.Wait()
		if s := failed.Load(); s != nil {
			t.Fatal(*s)
		}
	})
}

// TestManyAtOnce: ranks of several attempts in a real race.
func TestManyAtOnce(t *testing.T) {
	dir := memory(t)
	const attempts, ranks = 6, 3
	var all sync.WaitGroup
	var highest atomic.Uint64
	for g := uint64(1); g <= attempts; g++ {
		tok := token(g)
		for r := range ranks {
			all.Go(func() {
				f, err := Open(dir, tok)
				if err != nil {
					if !errors.Is(err, ErrHeld) {
						t.Error(err)
					}
					return
				}
				for {
					if was := highest.Load(); was >= g || highest.CompareAndSwap(was, g) {
						break
					}
				}
				for i := range 20 {
					latest := highest.Load()
					err := f.WriteFile(fmt.Sprintf("step-%d/rank%d", i, r), fmt.Appendf(nil, "%d", g))
					if err == nil && latest > g {
						t.Errorf("attempt %d wrote after attempt %d had the directory", g, latest)
					}
					if err != nil && !errors.Is(err, ErrHeld) {
						t.Error(err)
					}
				}
			})
		}
	}
	all.Wait()
	if highest.Load() != attempts {
		t.Errorf("attempt %d is the last that came in", highest.Load())
	}
	for name, v := range published(t, dir) {
		if v != fmt.Sprint(attempts) {
			t.Errorf("%s is attempt %s's", name, v)
		}
	}
}

func TestOldClaimsGo(t *testing.T) {
	dir := memory(t)
	first := mustOpen(t, dir, token(1))
	for g := uint64(2); g < keepClaims+20; g++ {
		mustOpen(t, dir, token(g))
	}
	claims, err := Claims(dir)
	if err != nil || len(claims) != keepClaims {
		t.Errorf("%d claims, %v", len(claims), err)
	}
	if err := first.WriteFile("x", nil); !errors.Is(err, ErrHeld) {
		t.Error(err)
	}
	if entries, _ := os.ReadDir(filepath.Join(dir, dirName)); len(entries) > 2*keepClaims+1 {
		t.Errorf("%d files are left", len(entries))
	}
}

func TestToken(t *testing.T) {
	a, b := New(1, 0), New(2, 1<<50)
	if b.Generation != 1<<50+1 || a.Generation == 0 || a.Nonce == b.Nonce {
		t.Errorf("%v %v", a, b)
	}
	t.Setenv(Env, "")
	if _, err := FromEnv(t.TempDir()); !errors.Is(err, ErrNone) {
		t.Error(err)
	}
	t.Setenv(Env, a.String())
	if f, err := FromEnv(t.TempDir()); err != nil || f.Token() != a {
		t.Error(err)
	}
	t.Setenv(Env, "fence1-x")
	if _, err := FromEnv(t.TempDir()); err == nil || errors.Is(err, ErrNone) {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(New(5, 0).String())
	f.Add("fence1-1-1-00")
	f.Add("fence1-+1-1-00000000000000000000000000000000")
	f.Fuzz(func(t *testing.T, s string) {
		if tok, err := Parse(s); err == nil && tok.String() != s {
			t.Errorf("%q is %q", s, tok)
		}
	})
}

func FuzzClaim(f *testing.F) {
	f.Add([]byte(`{"version":1,"generation":7,"attempt":2,"key":"00","node":"n","pid":1,"at":"2026-01-01T00:00:00Z"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		if err := os.MkdirAll(filepath.Join(dir, dirName), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, dirName, claimName(9)), b, 0o600); err != nil {
			t.Fatal(err)
		}
		// Whatever it says, it is there: an earlier attempt has lost, a later one goes on.
		if _, err := Open(dir, token(8)); !errors.Is(err, ErrHeld) {
			t.Errorf("earlier: %v", err)
		}
		if _, err := Open(dir, token(10)); err != nil {
			t.Errorf("later: %v", err)
		}
	})
}
