package remediation

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
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
	OutcomeSuperseded Outcome = "superseded" // the job was restarted after this alert began, or the incident was already acted on
	OutcomeStale      Outcome = "stale"      // older than max_age when its turn came
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
	Unit     string     `json:"unit,omitempty"` // taken out
	Started  time.Time  `json:"started,omitzero"`
	Tries    int        `json:"tries,omitempty"`
	Outcome  Outcome    `json:"outcome,omitempty"`
	Detail   string     `json:"detail,omitempty"`
	Finished time.Time  `json:"finished,omitzero"`
}

// BreakerState is a breaker that has opened.
type BreakerState struct {
	Scope string    `json:"scope"`
	Since time.Time `json:"since"`
	Why   string    `json:"why"`
}

// The journal keeps what it needs to refuse a repeat; older closed entries go.
const (
	journalVersion = "1"
	maxEntries     = 10_000
	maxPending     = 1_000
)

var (
	bucketMeta     = []byte("meta")
	bucketEntries  = []byte("entries")
	bucketSeen     = []byte("seen")
	bucketBreakers = []byte("breakers")
	bucketClosed   = []byte("breakers-closed")
	keyVersion     = []byte("version")

	// ErrJournalFull says that too many alerts wait for a decision.
	ErrJournalFull = errors.New("journal: too many pending alerts")
)

// journal is the durable memory, one bbolt file. Every method is one
// transaction and has reached the disk when it returns.
type journal struct{ db *bolt.DB }

func openJournal(path string) (*journal, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: 3 * time.Second})
	if err != nil {
		return nil, fmt.Errorf("journal %s: %w (is another remediator running on it?)", path, err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, b := range [][]byte{bucketMeta, bucketEntries, bucketSeen, bucketBreakers, bucketClosed} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		m := tx.Bucket(bucketMeta)
		switch v := m.Get(keyVersion); {
		case v == nil:
			return m.Put(keyVersion, []byte(journalVersion))
		case string(v) != journalVersion:
			return fmt.Errorf("is of version %.16q, this program writes %s", v, journalVersion)
		}
		return nil
	})
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	return &journal{db}, nil
}

func (j *journal) close() error { return j.db.Close() }

// add writes alerts that were not seen before, all or none, and returns how many were new.
func (j *journal) add(now time.Time, alerts []Alert) (added int, err error) {
	err = j.db.Update(func(tx *bolt.Tx) error {
		entries, seen := tx.Bucket(bucketEntries), tx.Bucket(bucketSeen)
		for i := range alerts {
			a := &alerts[i]
			k := []byte(a.key())
			if seen.Get(k) != nil {
				continue
			}
			seq, err := entries.NextSequence()
			if err != nil {
				return err
			}
			if err := seen.Put(k, seqKey(seq)); err != nil {
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
		if n := entries.Stats().KeyN; n > maxPending {
			return prune(entries, seen, max(0, n-maxEntries))
		}
		return nil
	})
	return added, err
}

// prune drops the n oldest closed entries, and refuses to go on when too many are pending.
func prune(entries, seen *bolt.Bucket, n int) error {
	var drop []*Entry
	pending := 0
	c := entries.Cursor()
	for k, v := c.First(); k != nil; k, v = c.Next() {
		e, err := readEntry(v)
		if err != nil {
			return err
		}
		if e.State != Closed {
			pending++
		} else if len(drop) < n {
			drop = append(drop, e)
		}
	}
	if pending > maxPending {
		return ErrJournalFull
	}
	for _, e := range drop {
		if err := errors.Join(entries.Delete(seqKey(e.Seq)), seen.Delete([]byte(e.Alert.key()))); err != nil {
			return err
		}
	}
	return nil
}

// update rewrites one entry.
func (j *journal) update(e *Entry) error {
	return j.db.Update(func(tx *bolt.Tx) error { return putEntry(tx.Bucket(bucketEntries), e) })
}

// each calls f for each entry, oldest first.
func (j *journal) each(f func(*Entry)) error {
	return j.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketEntries).ForEach(func(_, v []byte) error {
			e, err := readEntry(v)
			if err == nil {
				f(e)
			}
			return err
		})
	})
}

func (j *journal) openBreaker(b BreakerState) error {
	return j.db.Update(func(tx *bolt.Tx) error {
		bk := tx.Bucket(bucketBreakers)
		if bk.Get([]byte(b.Scope)) != nil {
			return nil
		}
		v, err := json.Marshal(b)
		if err != nil {
			return err
		}
		return bk.Put([]byte(b.Scope), v)
	})
}

// closeBreaker reports whether scope was open, and remembers when it was closed.
func (j *journal) closeBreaker(now time.Time, scope string) (was bool, err error) {
	err = j.db.Update(func(tx *bolt.Tx) error {
		bk := tx.Bucket(bucketBreakers)
		if was = bk.Get([]byte(scope)) != nil; !was {
			return nil
		}
		at, err := now.MarshalBinary()
		if err != nil {
			return err
		}
		return errors.Join(bk.Delete([]byte(scope)), tx.Bucket(bucketClosed).Put([]byte(scope), at))
	})
	return was, err
}

// closedAt returns when each scope's breaker was last closed.
func (j *journal) closedAt() (map[string]time.Time, error) {
	m := map[string]time.Time{}
	err := j.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketClosed).ForEach(func(k, v []byte) error {
			var t time.Time
			err := t.UnmarshalBinary(v)
			m[string(k)] = t
			return err
		})
	})
	return m, err
}

func (j *journal) breakers() (open []BreakerState, err error) {
	err = j.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketBreakers).ForEach(func(_, v []byte) error {
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

func putEntry(b *bolt.Bucket, e *Entry) error {
	v, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return b.Put(seqKey(e.Seq), v)
}

func readEntry(v []byte) (*Entry, error) {
	e := new(Entry)
	if err := json.Unmarshal(v, e); err != nil {
		return nil, fmt.Errorf("journal entry: %w", err)
	}
	return e, nil
}

func seqKey(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
