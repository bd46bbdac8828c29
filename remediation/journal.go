package remediation

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// State is how far a journaled alert has come.
type State string

const (
	Pending State = "pending" // on disk, not decided
	Running State = "running" // decided, handed to the actuator, no answer yet
	Closed  State = "closed"  // Outcome says how
)

// Outcome is how a journaled alert ended.
type Outcome string

const (
	OutcomeDone       Outcome = "done"       // the actuator did it
	OutcomeFailed     Outcome = "failed"     // the actuator could not, after retries
	OutcomeDryRun     Outcome = "dry_run"    // would have been done
	OutcomeNone       Outcome = "none"       // policy says nothing is to be done
	OutcomeRefused    Outcome = "refused"    // a breaker is open
	OutcomeSuperseded Outcome = "superseded" // the job was restarted after this alert began, or the incident was acted on already
	OutcomeUnknown    Outcome = "unknown"    // the job's master has no such incident
	OutcomeUnfenced   Outcome = "unfenced"   // no proof that nothing of the old attempt goes on, and the policy wants one
	OutcomeStale      Outcome = "stale"      // over, by its master's word, or older than max_age when its turn came
)

// Entry is one journaled alert and what came of it.
type Entry struct {
	Seq      uint64     `json:"seq"`
	Action   string     `json:"action_id"` // same for all alerts of one incident
	Alert    Alert      `json:"alert"`
	Received time.Time  `json:"received"`
	State    State      `json:"state"`
	Policy   string     `json:"policy,omitempty"`
	Kind     ActionKind `json:"kind,omitempty"`
	Unit     string     `json:"unit,omitempty"`    // taken out
	Started  time.Time  `json:"started,omitzero"`  // decided to act; zero when nothing was to be done, or was done
	Made     time.Time  `json:"made,omitzero"`     // Inventory.Made, when it was decided
	Breaker  string     `json:"breaker,omitempty"` // scope of the one that refused it
	Again    time.Time  `json:"again,omitzero"`    // a person let it be decided anew, after a breaker had refused it
	Fence    *Fencing   `json:"fence,omitempty"`   // what was asked before it was acted on
	Tries    int        `json:"tries,omitempty"`
	// Unanswered is how many of them nobody answered (ErrAway).
	Unanswered int       `json:"unanswered,omitempty"`
	Outcome    Outcome   `json:"outcome,omitempty"`
	Detail     string    `json:"detail,omitempty"`
	Finished   time.Time `json:"finished,omitzero"`
	// Effective is when the job ran again, for OutcomeDone.
	Effective time.Time `json:"effective,omitzero"`
}

// past is what the breakers count of an entry that was acted on.
func (e *Entry) past() past { return past{At: e.Started, Job: e.Alert.Job, Unit: e.Unit} }

// supersededBy says why o, which was acted on, leaves nothing for e to do; "" when it does not.
func (e *Entry) supersededBy(o *Entry) string {
	if o.Alert.Job != e.Alert.Job || o.Outcome == OutcomeFailed {
		return ""
	}
	if o.Action == e.Action {
		return fmt.Sprintf("incident %s was acted on by entry %d", e.Alert.Incident, o.Seq)
	}
	if was, is := o.Alert.Attempt, e.Alert.Attempt; was != nil && is != nil && *is > *was {
		return "" // it is about what came of that action, whatever the clocks say
	}
	if o.Outcome == OutcomeDone && o.Effective.After(e.Alert.began()) {
		return fmt.Sprintf("job was restarted by entry %d after this alert began", o.Seq)
	}
	return ""
}

// BreakerState is a breaker that has opened.
type BreakerState struct {
	Scope string    `json:"scope"`
	Since time.Time `json:"since"`
	Why   string    `json:"why"`
}

// The journal's bounds, in entries. It keeps what it needs to refuse a repeat
// and to count actions against the breakers; older closed entries go.
const (
	journalVersion = "2" // 1: values without checksums
	maxClosed      = 1_000
	maxOpen        = 1_000
	maxOpenOfJob   = 100 // so that one job's alerts do not shut out the others'
)

var (
	bucketMeta     = []byte("meta")
	bucketEntries  = []byte("entries")
	bucketSeen     = []byte("seen")
	bucketBreakers = []byte("breakers")
	bucketClosed   = []byte("breakers-closed")
	keyVersion     = []byte("version")
	keyAlive       = []byte("alive")

	sealedBuckets = [][]byte{bucketEntries, bucketSeen, bucketBreakers, bucketClosed}

	errInUse = errors.New("another remediator uses it")

	// ErrJournalFull says that too many alerts wait for a decision.
	ErrJournalFull = errors.New("journal: too many alerts wait for a decision")
)

// journal is the durable memory, one bbolt file. Every method is one
// transaction and has reached the disk when it returns.
type journal struct{ db *bolt.DB }

func openJournal(path string) (*journal, error) {
	wrap := func(err error) error {
		switch {
		case errors.Is(err, errInUse), errors.Is(err, bolterrors.ErrTimeout):
			err = fmt.Errorf("%w: end that one first, or give this one a journal of its own", errInUse)
		case errors.Is(err, errDamaged):
			err = fmt.Errorf("%w: no decision can be made without it: move it away, look at what the jobs' masters and supervisors tell, and start again with a new one (breakers that were open are closed then, and what was done is not counted)", err)
		}
		return fmt.Errorf("journal %s: %w", path, err)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, wrap(err)
	}
	if err := statedir.Check(dir); err != nil {
		return nil, wrap(err)
	}
	if err := checkPages(path, lockWithin); err != nil {
		return nil, wrap(err)
	}
	j := &journal{}
	err := guarded(func() (err error) {
		j.db, err = bolt.Open(path, 0o600, &bolt.Options{Timeout: lockWithin})
		return err
	})
	if err != nil {
		return nil, wrap(err)
	}
	err = j.change(func(tx *bolt.Tx) error {
		for _, b := range append([][]byte{bucketMeta}, sealedBuckets...) {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		m := tx.Bucket(bucketMeta)
		switch v := m.Get(keyVersion); {
		case v == nil:
			return m.Put(keyVersion, []byte(journalVersion))
		case string(v) == "1":
			return errors.Join(sealAll(tx), m.Put(keyVersion, []byte(journalVersion)))
		case string(v) != journalVersion:
			return fmt.Errorf("is of version %.16q, this program writes %s", v, journalVersion)
		}
		return nil
	})
	if err == nil {
		// A journal that cannot be read in full must not be decided on.
		err = j.readable()
	}
	if err != nil {
		j.db.Close()
		return nil, wrap(err)
	}
	return j, nil
}

// lockWithin is how long another process may still hold the journal.
const lockWithin = 3 * time.Second

// readable reads everything once.
func (j *journal) readable() error {
	err := j.each(func(*Entry) {})
	if err == nil {
		_, err = j.breakers()
	}
	if err == nil {
		_, err = j.closedAt()
	}
	if err == nil {
		err = j.view(func(tx *bolt.Tx) error {
			return sealedBucket(tx, bucketSeen).each(func(_, _ []byte) error { return nil })
		})
	}
	if err != nil && !errors.Is(err, errDamaged) {
		err = fmt.Errorf("%w: %w", errDamaged, err)
	}
	return err
}

// writable writes what says nothing, to know that decisions can be.
func (j *journal) writable(now time.Time) error {
	return j.change(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketMeta).Put(keyAlive, []byte(now.UTC().Format(time.RFC3339Nano)))
	})
}

// change and view are bbolt's transactions, which panic or fault on a page that has been
// damaged since it was looked at.
func (j *journal) change(f func(*bolt.Tx) error) error {
	return guarded(func() error { return j.db.Update(f) })
}

func (j *journal) view(f func(*bolt.Tx) error) error {
	return guarded(func() error { return j.db.View(f) })
}

func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", errDamaged, p)
		}
	}()
	return f()
}

func (j *journal) close() error { return j.db.Close() }

// add writes alerts that were not seen before, all or none, and returns how
// many were new, and how many were left out because too many of their jobs wait. To
// make room it drops the oldest closed entries, but none that acted after keep.
func (j *journal) add(now, keep time.Time, alerts []Alert) (added, over int, err error) {
	err = j.change(func(tx *bolt.Tx) error {
		entries, seen := sealedBucket(tx, bucketEntries), sealedBucket(tx, bucketSeen)
		waiting := map[string]int{}
		if err := eachEntry(entries, func(e *Entry) {
			if e.State != Closed {
				waiting[e.Alert.Job]++
			}
		}); err != nil {
			return err
		}
		for i := range alerts {
			a := &alerts[i]
			k := []byte(a.key())
			if seen.Get(k) != nil {
				continue
			}
			if waiting[a.Job] >= maxOpenOfJob {
				over++
				continue
			}
			waiting[a.Job]++
			seq, err := entries.NextSequence()
			if err != nil {
				return err
			}
			if err := seen.put(k, seqKey(seq)); err != nil {
				return err
			}
			if err := putEntry(entries, &Entry{Seq: seq, Action: a.actionID(), Alert: *a, Received: now, State: Pending}); err != nil {
				return err
			}
			added++
		}
		if added == 0 {
			return nil
		}
		return makeRoom(entries, seen, keep)
	})
	if err != nil {
		added = 0
	}
	return added, over, err
}

func makeRoom(entries, seen sealed, keep time.Time) error {
	open, closed := 0, 0
	var spare []*Entry
	err := eachEntry(entries, func(e *Entry) {
		if e.State != Closed {
			open++
			return
		}
		closed++
		if e.Started.Before(keep) {
			spare = append(spare, e)
		}
	})
	if err != nil {
		return err
	}
	if open > maxOpen {
		return ErrJournalFull
	}
	for _, e := range spare[:min(len(spare), max(0, closed-maxClosed))] {
		if err := errors.Join(entries.Delete(seqKey(e.Seq)), seen.Delete([]byte(e.Alert.key()))); err != nil {
			return err
		}
	}
	return nil
}

// update rewrites one entry.
func (j *journal) update(e *Entry) error {
	return j.change(func(tx *bolt.Tx) error { return putEntry(sealedBucket(tx, bucketEntries), e) })
}

// get reads one entry.
func (j *journal) get(seq uint64) (e *Entry, err error) {
	err = j.view(func(tx *bolt.Tx) error {
		v, err := sealedBucket(tx, bucketEntries).get(seqKey(seq))
		if err == nil {
			e, err = readEntry(v)
		}
		return err
	})
	return e, err
}

// each calls f for each entry, oldest first; f may keep it.
func (j *journal) each(f func(*Entry)) error {
	return j.view(func(tx *bolt.Tx) error { return eachEntry(sealedBucket(tx, bucketEntries), f) })
}

func eachEntry(b sealed, f func(*Entry)) error {
	return b.each(func(_, v []byte) error {
		e, err := readEntry(v)
		if err == nil {
			f(e)
		}
		return err
	})
}

// openBreaker leaves a breaker that is open already as it is.
func (j *journal) openBreaker(b BreakerState) error {
	return j.change(func(tx *bolt.Tx) error {
		bk := sealedBucket(tx, bucketBreakers)
		if bk.Get([]byte(b.Scope)) != nil {
			return nil
		}
		v, err := json.Marshal(b)
		if err != nil {
			return err
		}
		return bk.put([]byte(b.Scope), v)
	})
}

// closeBreaker reports whether scope was open, and remembers when it was closed. With again, what
// it has refused is to be decided anew: how many entries that are.
func (j *journal) closeBreaker(now time.Time, scope string, again bool) (was bool, reopened int, err error) {
	err = j.change(func(tx *bolt.Tx) error {
		was, reopened = false, 0
		bk := sealedBucket(tx, bucketBreakers)
		if was = bk.Get([]byte(scope)) != nil; !was {
			return nil
		}
		v, err := bk.get([]byte(scope))
		if err != nil {
			return err
		}
		var b BreakerState
		if err := json.Unmarshal(v, &b); err != nil {
			return err
		}
		at, err := now.MarshalBinary()
		if err != nil {
			return err
		}
		if again {
			if reopened, err = reopen(sealedBucket(tx, bucketEntries), b, now); err != nil {
				return err
			}
		}
		return errors.Join(bk.Delete([]byte(scope)), sealedBucket(tx, bucketClosed).put([]byte(scope), at))
	})
	return was, reopened, err
}

// reopen makes pending what a breaker has refused since it opened.
func reopen(entries sealed, b BreakerState, now time.Time) (n int, err error) {
	var list []*Entry
	if err := eachEntry(entries, func(e *Entry) {
		if e.Outcome == OutcomeRefused && e.Breaker == b.Scope && !e.Finished.Before(b.Since) {
			list = append(list, e)
		}
	}); err != nil {
		return 0, err
	}
	for _, e := range list {
		e.State, e.Again = Pending, now
		e.Outcome, e.Detail, e.Finished, e.Unit, e.Breaker = "", "", time.Time{}, "", ""
		if err := putEntry(entries, e); err != nil {
			return 0, err
		}
	}
	return len(list), nil
}

// closedAt returns when each scope's breaker was last closed.
func (j *journal) closedAt() (map[string]time.Time, error) {
	m := map[string]time.Time{}
	err := j.view(func(tx *bolt.Tx) error {
		return sealedBucket(tx, bucketClosed).each(func(k, v []byte) error {
			var t time.Time
			err := t.UnmarshalBinary(v)
			m[string(k)] = t
			return err
		})
	})
	return m, err
}

// breakers returns the open ones.
func (j *journal) breakers() (open []BreakerState, err error) {
	err = j.view(func(tx *bolt.Tx) error {
		return sealedBucket(tx, bucketBreakers).each(func(_, v []byte) error {
			var b BreakerState
			if err := json.Unmarshal(v, &b); err != nil {
				return err
			}
			open = append(open, b)
			return nil
		})
	})
	return open, err
}

func putEntry(b sealed, e *Entry) error {
	v, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return b.put(seqKey(e.Seq), v)
}

func readEntry(v []byte) (*Entry, error) {
	e := new(Entry)
	if err := json.Unmarshal(v, e); err != nil {
		return nil, fmt.Errorf("journal entry: %w", err)
	}
	return e, nil
}

func seqKey(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
