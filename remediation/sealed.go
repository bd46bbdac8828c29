package remediation

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	bolt "go.etcd.io/bbolt"
)

// sealed is a bucket each of whose values begins with a checksum of bucket, key and
// value: pages are looked at when the journal is opened, but what a page holds may be
// read wrong and be JSON still.
type sealed struct {
	name string
	*bolt.Bucket
}

func sealedBucket(tx *bolt.Tx, name []byte) sealed { return sealed{string(name), tx.Bucket(name)} }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const sealBytes = 4

func (s sealed) sum(key, value []byte) uint32 {
	c := crc32.Checksum([]byte(s.name), castagnoli)
	return crc32.Update(crc32.Update(c, castagnoli, key), castagnoli, value)
}

func (s sealed) put(key, value []byte) error {
	v := binary.BigEndian.AppendUint32(make([]byte, 0, sealBytes+len(value)), s.sum(key, value))
	return s.Put(key, append(v, value...))
}

// get returns nil for a key that is not there.
func (s sealed) get(key []byte) ([]byte, error) {
	v := s.Get(key)
	if v == nil {
		return nil, nil
	}
	return s.open(key, v)
}

func (s sealed) open(key, v []byte) ([]byte, error) {
	if len(v) < sealBytes || binary.BigEndian.Uint32(v) != s.sum(key, v[sealBytes:]) {
		return nil, fmt.Errorf("%w: the value of %s %.64q is not what was written", errDamaged, s.name, key)
	}
	return v[sealBytes:], nil
}

func (s sealed) each(f func(key, value []byte) error) error {
	return s.ForEach(func(k, v []byte) error {
		v, err := s.open(k, v)
		if err != nil {
			return err
		}
		return f(k, v)
	})
}

// sealAll seals the values of a journal of version 1, which had no checksums.
func sealAll(tx *bolt.Tx) error {
	for _, name := range sealedBuckets {
		b := sealedBucket(tx, name)
		plain := map[string][]byte{}
		if err := b.ForEach(func(k, v []byte) error {
			plain[string(k)] = append([]byte{}, v...)
			return nil
		}); err != nil {
			return err
		}
		for k, v := range plain {
			if err := b.put([]byte(k), v); err != nil {
				return err
			}
		}
	}
	return nil
}
