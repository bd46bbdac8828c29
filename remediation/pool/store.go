package pool

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	bolt "go.etcd.io/bbolt"
)

// Memory is a Store that outlives nothing: for tests, and for pools whose books are
// made anew from the scheduler's own.
type Memory struct {
	mu sync.Mutex
	b  []byte
}

// Load implements Store.
func (m *Memory) Load() ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.b), nil
}

// Save implements Store.
func (m *Memory) Save(b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.b = slices.Clone(b)
	return nil
}

// Bolt is a Store in a database that its owner has opened: the state of each job's pool is
// one value of the bucket "pools".
type Bolt struct {
	DB  *bolt.DB
	Job string
}

var bucketPools = []byte("pools")

// Load implements Store.
func (b *Bolt) Load() (state []byte, err error) {
	err = b.do(b.DB.View, func(tx *bolt.Tx) error {
		if bk := tx.Bucket(bucketPools); bk != nil {
			state = slices.Clone(bk.Get([]byte(b.Job)))
		}
		return nil
	})
	return state, err
}

// Save implements Store.
func (b *Bolt) Save(state []byte) error {
	return b.do(b.DB.Update, func(tx *bolt.Tx) error {
		bk, err := tx.CreateBucketIfNotExists(bucketPools)
		if err != nil {
			return err
		}
		return bk.Put([]byte(b.Job), state)
	})
}

func (b *Bolt) do(in func(func(*bolt.Tx) error) error, f func(*bolt.Tx) error) error {
	if b.DB == nil || b.Job == "" {
		return errors.New("no database, or no job")
	}
	if err := in(f); err != nil {
		return fmt.Errorf("%s: pool of job %s: %w", b.DB.Path(), b.Job, err)
	}
	return nil
}
