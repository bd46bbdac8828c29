package pool

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"pgregory.net/rapid"
)

// clock is virtual time.
type clock struct{ t time.Time }

func (c *clock) now() time.Time { return c.t }

func newClock() *clock { return &clock{time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)} }

func names(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("n%03d", i))
	}
	return list
}

func opened(t *testing.T, c Config, units int) (*Pool, *Memory, *clock) {
	t.Helper()
	m, now := &Memory{}, newClock()
	p, err := OpenAt(c, m, now.now)
	if err == nil {
		err = p.Sync(names(units))
	}
	if err != nil {
		t.Fatal(err)
	}
	return p, m, now
}

func TestOneSuspect(t *testing.T) {
	p, _, now := opened(t, Config{Need: 128}, 136)
	if s := p.State(); s.Count(Active) != 128 || s.Count(Spare) != 8 {
		t.Fatalf("%d work, %d stand by", s.Count(Active), s.Count(Spare))
	}
	suspect := p.State().In(Active)[5]
	a, err := p.Take(suspect, "a1", "slow")
	if err != nil || a.Kind != Swap || a.Spare == "" {
		t.Fatalf("%+v, %v", a, err)
	}
	now.t = now.t.Add(time.Minute)
	for range 3 {
		if again, err := p.Take(suspect, "a1", "slow"); err != nil || again != a {
			t.Errorf("again: %+v, %v, want %+v", again, err, a)
		}
	}
	if _, err := p.Take(a.Spare, "a1", "slow"); err == nil {
		t.Error("one action took out two units")
	}
	if other, err := p.Take(suspect, "a2", "hangs"); err != nil || other.Kind != Already || other.Spare != a.Spare {
		t.Errorf("another action about it: %+v, %v", other, err)
	}
	if s := p.State(); s.Count(Active) != 128 || s.Count(Spare) != 7 || s.Count(Suspect) != 1 {
		t.Errorf("%+v", s)
	}
	if err := p.Passed(suspect, "preflight"); !errors.Is(err, ErrPlace) {
		t.Errorf("came back without a check: %v", err)
	}
	if err := errors.Join(p.Return(suspect, "new NIC"), p.Failed(suspect, "edge 3 slow"), p.Return(suspect, "new cable"), p.Passed(suspect, "preflight")); err != nil {
		t.Fatal(err)
	}
	if u := p.Units()[suspect]; u.Place != Spare || u.Strikes != 2 {
		t.Errorf("%+v", u)
	}
}

func TestEmptyPool(t *testing.T) {
	for _, empty := range []Empty{EmptyInPlace, EmptyWait} {
		t.Run(string(empty), func(t *testing.T) {
			p, _, _ := opened(t, Config{Need: 4, MaxOutShare: 1, Empty: empty}, 5)
			if a, err := p.Take("n000", "a1", ""); err != nil || a.Kind != Swap {
				t.Fatalf("%+v, %v", a, err)
			}
			a, err := p.Take("n001", "a2", "")
			if err != nil || !strings.Contains(a.Detail, "no spare is left (out: n000") {
				t.Fatalf("%+v, %v", a, err)
			}
			if empty == EmptyInPlace {
				if a.Kind != InPlace || p.Units()["n001"].Place != Active {
					t.Errorf("%+v, %+v", a, p.Units()["n001"])
				}
				return
			}
			if a.Kind != Wait || p.Units()["n001"].Place != Suspect {
				t.Errorf("%+v, %+v", a, p.Units()["n001"])
			}
			if err := errors.Join(p.Return("n000", ""), p.Passed("n000", "")); err != nil {
				t.Fatal(err)
			}
			// The spare is kept for who waits.
			if u := p.Units()["n000"]; u.Place != Spare {
				t.Fatalf("%+v", u)
			}
			if a, err = p.Take("n001", "a2", ""); err != nil || a.Kind != Swap || a.Spare != "n000" {
				t.Errorf("after the wait: %+v, %v", a, err)
			}
		})
	}
}

func TestBound(t *testing.T) {
	p, _, _ := opened(t, Config{Need: 128}, 136)
	for i := range 20 { // 10 % of 136 are 13; there are 8 spares
		a, err := p.Take(p.State().In(Active)[0], fmt.Sprintf("a%d", i), "")
		want := Swap
		if i >= 8 {
			want = InPlace
		}
		if err != nil || a.Kind != want {
			t.Fatalf("%d: %+v, %v", i, a, err)
		}
	}
	p, _, _ = opened(t, Config{Need: 30, MaxOut: 2}, 60)
	for i, want := range []Kind{Swap, Swap, Refused, Refused} {
		a, err := p.Take(p.State().In(Active)[0], fmt.Sprintf("a%d", i), "")
		if err != nil || a.Kind != want {
			t.Fatalf("%d: %+v, %v", i, a, err)
		}
	}
	if p.State().Out() != 2 {
		t.Error("more are out than may be")
	}
	if err := errors.Join(p.Return("n000", ""), p.Passed("n000", "")); err != nil {
		t.Fatal(err)
	}
	if a, err := p.Take(p.State().Actions["a3"].Suspect, "a3", ""); err != nil || a.Kind != Swap {
		t.Errorf("refused once, for good: %+v, %v", a, err)
	}
}

func TestCancel(t *testing.T) {
	p, _, _ := opened(t, Config{Need: 4, MaxOutShare: 1}, 6)
	a, err := p.Take("n001", "a1", "")
	if err == nil {
		err = p.Cancel("a1")
	}
	if err == nil {
		err = p.Cancel("a1")
	}
	if err != nil || p.Units()["n001"].Place != Active || p.Units()[a.Spare].Place != Spare || p.Units()["n001"].Strikes != 0 {
		t.Fatalf("%v: %+v", err, p.Units())
	}
	if _, err = p.Take("n002", "a2", ""); err != nil {
		t.Fatal(err)
	}
	if err := p.Return("n002", ""); err != nil {
		t.Fatal(err)
	}
	if err := p.Cancel("a2"); !errors.Is(err, ErrPlace) {
		t.Errorf("taken back after the unit was repaired: %v", err)
	}
}

func TestRest(t *testing.T) {
	p, _, now := opened(t, Config{Need: 4, MaxOutShare: 1, Rest: time.Hour, MaxStrikes: 2}, 6)
	take := func(action string) {
		t.Helper()
		if a, err := p.Take("n000", action, ""); err != nil || (a.Kind != Swap && a.Kind != Removed) {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	due := func(want ...string) {
		t.Helper()
		if got, err := p.Probation(); err != nil || !slices.Equal(got, want) {
			t.Fatalf("due: %v, %v; want %v", got, err, want)
		}
	}
	take("a1")
	due()
	now.t = now.t.Add(time.Hour)
	due("n000")
	due("n000")
	if err := p.Passed("n000", ""); err != nil {
		t.Fatal(err)
	}
	take("a2")
	now.t = now.t.Add(time.Hour)
	due() // twice the time
	now.t = now.t.Add(time.Hour)
	due("n000")
	if err := p.Failed("n000", "slow edge"); err != nil {
		t.Fatal(err)
	}
	now.t = now.t.Add(100 * time.Hour)
	due() // a third strike: a person has to look
}

func TestInventory(t *testing.T) {
	p, _, _ := opened(t, Config{Need: 4, MaxOutShare: 1}, 6)
	if _, err := p.Take("n000", "a1", ""); err != nil {
		t.Fatal(err)
	}
	if err := p.Sync(names(6)[1:]); err != nil || p.Units()["n000"].Place != Suspect {
		t.Errorf("one that is out and was taken from the inventory: %v, %+v", err, p.Units()["n000"])
	}
	if err := p.Sync([]string{"n000", "n001", "n002"}); err != nil || p.State().Count(Active) != 2 {
		t.Errorf("%v, %+v", err, p.State())
	}
	if err := p.Assign([]string{"n000", "n001"}); !errors.Is(err, ErrPlace) {
		t.Errorf("the job runs on what is out: %v", err)
	}
	if err := errors.Join(p.Forget("n000"), p.Forget("n000"), p.Sync([]string{"n000", "n001", "n002"})); err != nil || p.State().Count(Active) != 3 {
		t.Errorf("%v, %+v", err, p.State())
	}
	if err := p.Assign([]string{"n001"}); err != nil || !slices.Equal(p.State().In(Active), []string{"n001"}) {
		t.Errorf("%v, %v", err, p.State().In(Active))
	}
}

// broken is a Store that fails when it is told to.
type broken struct {
	Memory
	fail bool
}

func (b *broken) Save(s []byte) error {
	if b.fail {
		return errors.New("disk full")
	}
	return b.Memory.Save(s)
}

// TestBooks: whatever is asked in whatever order, killed and asked again, the books
// are those of a reader who only counts.
func TestBooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now, store := newClock(), &broken{}
		total := rapid.IntRange(1, 12).Draw(t, "total")
		c := Config{
			Need: rapid.IntRange(1, 12).Draw(t, "need"), MaxOut: rapid.IntRange(0, 5).Draw(t, "max out"),
			MaxOutShare: rapid.Float64Range(0.05, 1).Draw(t, "share"), Empty: rapid.SampledFrom([]Empty{EmptyInPlace, EmptyWait}).Draw(t, "empty"),
			Rest: rapid.SampledFrom([]time.Duration{0, time.Hour}).Draw(t, "rest"),
		}
		p, err := OpenAt(c, store, now.now)
		if err == nil {
			err = p.Sync(names(total))
		}
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]bool{} // the reader's books
		answers := map[string]Answer{}
		for step := range rapid.IntRange(1, 60).Draw(t, "steps") {
			now.t = now.t.Add(time.Duration(rapid.IntRange(0, 90).Draw(t, "minutes")) * time.Minute)
			before := p.State()
			unit := rapid.SampledFrom(names(total)).Draw(t, "unit")
			op := rapid.IntRange(0, 8).Draw(t, "op")
			store.fail = rapid.IntRange(0, 9).Draw(t, "disk") == 0
			var err error
			switch op {
			case 0, 1, 2:
				action := fmt.Sprintf("a%d", step)
				if old := slices.Sorted(maps.Keys(answers)); len(old) > 0 && op == 2 {
					action = rapid.SampledFrom(old).Draw(t, "again")
					unit = answers[action].Suspect
				}
				was, known := answers[action]
				var a Answer
				a, err = p.Take(unit, action, "why")
				if err != nil {
					break
				}
				if known && was.Final() && was.Cancelled.IsZero() && a != was {
					t.Fatalf("%s: %+v, and before %+v", action, a, was)
				}
				answers[action] = a
				if known && (was.Final() || !was.Cancelled.IsZero()) {
					break
				}
				switch a.Kind {
				case Swap, Removed, Wait:
					if known && was.Kind == Wait {
						break
					}
					if before.Units[unit].Out() {
						t.Fatalf("%s was out, and is taken out: %+v", unit, a)
					}
					out[unit] = true
					if n := len(out); n > c.bound(total) {
						t.Fatalf("%d are out, at most %d may be", n, c.bound(total))
					}
				}
				if a.Kind == Swap && (before.Units[a.Spare].Place != Spare || p.Units()[a.Spare].Place != Active) {
					t.Fatalf("%+v, the spare was %s", a, before.Units[a.Spare].Place)
				}
				if (a.Kind == InPlace || a.Kind == Wait && !known) && before.Count(Spare) > 0 {
					t.Fatalf("%+v, and there were spares", a)
				}
			case 3:
				err = p.Return(unit, "")
			case 4:
				if err = p.Passed(unit, ""); err == nil {
					delete(out, unit)
				}
			case 5:
				err = p.Failed(unit, "")
			case 6:
				_, err = p.Probation()
			case 7:
				err = p.Sync(names(total))
			case 8:
				old := slices.Sorted(maps.Keys(answers))
				if len(old) == 0 {
					break
				}
				action := rapid.SampledFrom(old).Draw(t, "cancel")
				a := answers[action]
				if err = p.Cancel(action); err == nil && a.Cancelled.IsZero() {
					if a.Kind == Swap || a.Kind == Removed || a.Kind == Wait {
						delete(out, a.Suspect)
					}
					answers[action] = *p.State().Actions[action]
				}
			}
			if err != nil {
				b1, _ := json.Marshal(before)
				b2, _ := json.Marshal(p.State())
				if string(b1) != string(b2) {
					t.Fatalf("op %d failed (%v) and changed the state:\n%s\n%s", op, err, b1, b2)
				}
			}
			store.fail = false
			s := p.State()
			if err := s.Check(); err != nil {
				t.Fatal(err)
			}
			if len(s.Units) != total || s.Out() != len(out) {
				t.Fatalf("%d units, %d out; want %d and %d", len(s.Units), s.Out(), total, len(out))
			}
			for u := range out {
				if !s.Units[u].Out() {
					t.Fatalf("%s is %s, and was taken out", u, s.Units[u].Place)
				}
			}
			if s.Count(Active) > c.Need {
				t.Fatalf("%d work, and %d are needed", s.Count(Active), c.Need)
			}
			if s.Count(Active)+s.waiting() < c.Need && s.Count(Spare) > 0 {
				t.Fatalf("%d work of %d, and %d stand by", s.Count(Active), c.Need, s.Count(Spare))
			}
			if rapid.IntRange(0, 3).Draw(t, "killed") == 0 { // and started again
				if p, err = OpenAt(c, store, now.now); err != nil {
					t.Fatal(err)
				}
				b1, _ := json.Marshal(s)
				if b2, _ := json.Marshal(p.State()); string(b1) != string(b2) {
					t.Fatalf("was\n%s\nis\n%s", b1, b2)
				}
			}
		}
	})
}

func TestBolt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pools.db")
	for round := range 2 {
		db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		for _, job := range []string{"llm", "other"} {
			p, err := Open(Config{Need: 2, MaxOutShare: 1}, &Bolt{DB: db, Job: job})
			if err == nil {
				err = p.Sync(names(3))
			}
			if err != nil {
				t.Fatal(err)
			}
			if round == 0 && job == "llm" {
				_, err = p.Take("n000", "a1", "")
			}
			if n := p.State().Out(); err != nil || job == "llm" && n != 1 || job == "other" && n != 0 {
				t.Errorf("round %d, %s: %d out, %v", round, job, n, err)
			}
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{}, {Need: -1}, {Need: 1, MaxOutShare: 2}, {Need: 1, MaxOut: -1}, {Need: 1, Empty: "panic"}, {Need: 1, Rest: -1}} {
		if _, err := Open(c, &Memory{}); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}

func FuzzDecode(f *testing.F) {
	p, err := Open(Config{Need: 2, MaxOutShare: 1}, &Memory{})
	if err == nil {
		err = p.Sync(names(3))
	}
	if err == nil {
		_, err = p.Take("n000", "a1", "why")
	}
	if err != nil {
		f.Fatal(err)
	}
	b, _ := json.Marshal(p.State())
	f.Add(b)
	f.Add([]byte(`{"version":1,"units":{"a":null},"actions":{}}`))
	f.Add([]byte(`{"version":1,"units":{},"actions":{}}{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decode(b)
		if err != nil {
			if !errors.Is(err, ErrState) {
				t.Fatal(err)
			}
			return
		}
		store := &Memory{b: b}
		p, err := Open(Config{Need: 2}, store)
		if err != nil {
			t.Fatal(err)
		}
		for name := range s.Units {
			if _, err := p.Take(name, "fuzz", ""); err != nil && s.Actions["fuzz"] == nil {
				t.Fatal(err)
			}
			break
		}
		if _, err := decode(mustJSON(p.State())); err != nil {
			t.Fatal(err)
		}
	})
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
