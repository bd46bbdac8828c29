package remediation

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"
)

// full makes a journal with entries of every state, some of them long, and room that was freed.
func full(t testing.TB, path string, entries int) {
	t.Helper()
	j, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for i := range entries {
		a := Alert{Name: "x", Job: fmt.Sprint("job-", i%7), Incident: fmt.Sprint("i-", i), Class: "communication_hang", Level: "confirmed",
			Fingerprint: fmt.Sprint("f-", i), StartsAt: now, Culprit: strings.Repeat("c", i%400)}
		if _, _, err := j.add(now, now, []Alert{a}); err != nil {
			t.Fatal(err)
		}
		e, err := j.get(uint64(i + 1))
		if err != nil {
			t.Fatal(err)
		}
		e.State, e.Started, e.Detail = Closed, now, strings.Repeat("d", (i*37)%1024)
		if err := errors.Join(j.update(e), j.openBreaker(BreakerState{Scope: fmt.Sprint("job:", i%9), Since: now})); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := j.closeBreaker(now, "job:3", false); err != nil {
		t.Fatal(err)
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
}

func entriesOf(t *testing.T, path string) (all []*Entry) {
	t.Helper()
	j, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(j.each(func(e *Entry) { all = append(all, e) }), j.close()); err != nil {
		t.Fatal(err)
	}
	return all
}

// A bit that flips in a value, and leaves it JSON, is noticed.
func TestAValueThatIsNotWhatWasWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	full(t, path, 5)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{`"incident":"i-2"`, `"scope":"job:1"`} {
		b := bytes.ReplaceAll(whole, []byte(text), []byte(strings.Replace(text, "-2", "-3", 1)[:len(text)-2]+`7"`))
		if bytes.Equal(b, whole) {
			t.Fatalf("no %s", text)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if j, err := openJournal(path); !errors.Is(err, errDamaged) || !strings.Contains(err.Error(), "move it away") {
			t.Errorf("%s: %v, %v", text, j, err)
		}
	}
}

// A journal of version 1, whose values have no checksums, is taken over as it is.
func TestAJournalOfTheFormerVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	full(t, path, 20)
	want := entriesOf(t, path)
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range sealedBuckets {
			b, plain := sealedBucket(tx, name), map[string][]byte{}
			if err := b.each(func(k, v []byte) error { plain[string(k)] = bytes.Clone(v); return nil }); err != nil {
				return err
			}
			for k, v := range plain {
				if err := b.Put([]byte(k), v); err != nil {
					return err
				}
			}
		}
		return tx.Bucket(bucketMeta).Put(keyVersion, []byte("1"))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	for range 2 { // taken over, and read again
		if got := entriesOf(t, path); !cmp.Equal(got, want) {
			t.Fatal(cmp.Diff(want, got))
		}
	}
}

// A journal with any page torn, overwritten, moved or cut is read in full or refused by a
// clear error that names the file: never a panic, a fault, or an endless walk.
func TestADamagedJournal(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "j.db")
	full(t, path, 50)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	was := entriesOf(t, path)
	const page = 4096
	pages := len(whole) / page
	rng := rand.New(rand.NewPCG(1, 2))
	damage := []func(b []byte) []byte{
		func(b []byte) []byte { // a random page
			at := rng.IntN(pages) * page
			for i := range page {
				b[at+i] = byte(rng.Uint32())
			}
			return b
		},
		func(b []byte) []byte { clear(b[rng.IntN(pages)*page:][:page]); return b }, // one that never reached the disk
		func(b []byte) []byte { // torn: half of another
			from, to := rng.IntN(pages)*page, rng.IntN(pages)*page
			copy(b[to:to+512*(1+rng.IntN(7))], b[from:])
			return b
		},
		func(b []byte) []byte { // moved, its number right
			from, to := rng.IntN(pages)*page, rng.IntN(pages)*page
			copy(b[to+8:to+page], b[from+8:from+page])
			return b
		},
		func(b []byte) []byte { // a few bits of a header or an element
			at := rng.IntN(pages) * page
			for range 1 + rng.IntN(3) {
				b[at+rng.IntN(64)] ^= 1 << rng.IntN(8)
			}
			return b
		},
		func(b []byte) []byte { // anywhere
			for range 1 + rng.IntN(16) {
				b[rng.IntN(len(b))] = byte(rng.Uint32())
			}
			return b
		},
		func(b []byte) []byte { return b[:rng.IntN(len(b))] },                  // cut
		func(b []byte) []byte { return b[:page*(1+rng.IntN(pages-1))] },        // at a page
		func(b []byte) []byte { return []byte(strings.Repeat("x", len(b)/2)) }, // no journal
	}
	refused := 0
	for i := range 300 {
		b := damage[i%len(damage)](append([]byte(nil), whole...))
		path := filepath.Join(dir, "damaged.db")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := openJournal(path)
		if err != nil {
			refused++
			if text := err.Error(); !strings.Contains(text, path) || !strings.Contains(text, "move it away") {
				t.Fatalf("damage %d: the error does not help: %v", i, err)
			}
			continue
		}
		if err := j.each(func(e *Entry) {
			if e.Seq > uint64(len(was)) || !cmp.Equal(e.Alert, was[e.Seq-1].Alert) {
				t.Errorf("damage %d: entry %d is not what was written: %+v", i, e.Seq, e)
			}
		}); err != nil {
			t.Fatal(err)
		}
		// What was read in full is used: writing must not fall over what is free, or in use.
		now := time.Now()
		for k := range 2 {
			_, _, err := j.add(now, now, []Alert{{Name: "x", Job: "j", Incident: fmt.Sprint("n-", k), Class: "c", Level: "l", Fingerprint: fmt.Sprint(i, k), StartsAt: now}})
			if err != nil && !errors.Is(err, errDamaged) {
				t.Fatalf("damage %d: %v", i, err)
			}
		}
		if err := j.close(); err != nil {
			t.Fatal(err)
		}
	}
	if refused < 120 {
		t.Errorf("%d of 300 were refused", refused)
	}
	t.Logf("%d of 300 damaged journals of %d pages were refused", refused, pages)
}

// FuzzPages holds that the check comes to an end on any file.
func FuzzPages(f *testing.F) {
	path := filepath.Join(f.TempDir(), "j.db")
	full(f, path, 3)
	whole, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Fuzz(func(_ *testing.T, b []byte) { _ = checkFile(b) })
}

// One remediator a journal: the second one says whose it is, and harms nothing.
func TestTwoRemediatorsOneJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	j, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	if _, err := openJournal(path); !errors.Is(err, errInUse) || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
}

// Webhooks are Alertmanager's, breakers the operator's: neither token does what the other's does.
func TestEachTokenIsForItsDoor(t *testing.T) {
	g := start(t, "", live(), &fake{})
	h := g.r.Handler()
	for _, c := range []struct {
		method, path string
		token        []byte
		code         int
	}{
		{http.MethodPost, "/api/v1/breakers/close?scope=total", nil, http.StatusUnauthorized},
		{http.MethodPost, "/api/v1/breakers/close?scope=total", token, http.StatusForbidden},
		{http.MethodPost, "/api/v1/breakers/close?scope=total", operatorToken, http.StatusNotFound}, // none is open
		{http.MethodPost, "/webhook", operatorToken, http.StatusForbidden},
		{http.MethodPost, "/webhook", token, http.StatusBadRequest}, // no body
		{http.MethodGet, "/api/v1/breakers", token, http.StatusOK},
		{http.MethodGet, "/api/v1/actions", operatorToken, http.StatusOK},
		{http.MethodGet, "/api/v1/actions", []byte("0123456789abcdef0"), http.StatusUnauthorized},
	} {
		req := httptest.NewRequest(c.method, c.path, nil)
		if c.token != nil {
			req.Header.Set("Authorization", "Bearer "+string(c.token))
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		if w.Code != c.code {
			t.Errorf("%s %s with %.12q: %d, want %d", c.method, c.path, c.token, w.Code, c.code)
		}
	}
	for name, o := range map[string][]byte{"short": []byte("short"), "the same": token} {
		if _, err := New(Options{Config: live(), Journal: filepath.Join(t.TempDir(), "j.db"), Token: token, OperatorToken: o, Actuator: &fake{}, BelieveAlerts: true}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Ready is that decisions can be journaled now.
func TestReadyIsThatTheJournalCanBeWritten(t *testing.T) {
	g := start(t, "", live(), &fake{})
	until := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal(what)
			}
		}
	}
	until("ready", func() bool { return g.r.Ready() == nil })
	g.r.wrote.Store(&wrote{time.Now(), errors.New("no space left on device")})
	if err := g.r.Ready(); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Error(err)
	}
	until("ready again", func() bool { return g.r.Ready() == nil })
}
