package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/lockstep-ccl/lockstep/record"
)

// Signature is what all ranks of a collective, or both ends of a message, must agree on.
type Signature struct {
	Coll  record.CollKind // Send at both ends of a point-to-point message
	DType record.DType
	Op    record.RedOp
	Root  int32  // -1 if there is none
	Seq   uint64 // number of the collective in its communicator, 0 for a point-to-point message
	Count uint64 // elements; bytes of the message if counts may differ by pair of ranks
}

// SignatureSize is the length of an encoded signature in bytes.
const SignatureSize = 32

const signatureMagic = 0x504f4b4c // "LKOP"

// Encode writes s to b[:SignatureSize]. It panics if b is shorter.
func (s *Signature) Encode(b []byte) {
	_ = b[SignatureSize-1]
	binary.LittleEndian.PutUint32(b[0:], signatureMagic)
	binary.LittleEndian.PutUint32(b[4:], uint32(s.Root))
	binary.LittleEndian.PutUint64(b[8:], s.Seq)
	binary.LittleEndian.PutUint64(b[16:], s.Count)
	b[24], b[25], b[26] = uint8(s.Coll), uint8(s.DType), uint8(s.Op)
	clear(b[27:SignatureSize])
}

// Decode is the inverse of Encode. It returns false if b does not begin with a signature.
func (s *Signature) Decode(b []byte) bool {
	if len(b) < SignatureSize || binary.LittleEndian.Uint32(b) != signatureMagic {
		return false
	}
	s.Root = int32(binary.LittleEndian.Uint32(b[4:]))
	s.Seq = binary.LittleEndian.Uint64(b[8:])
	s.Count = binary.LittleEndian.Uint64(b[16:])
	s.Coll, s.DType, s.Op = record.CollKind(b[24]), record.DType(b[25]), record.RedOp(b[26])
	return true
}

// tag hashes s to the 32 bits that a line has room for. It is never 0.
func (s *Signature) tag() uint32 {
	h := s.Seq*0x9e3779b97f4a7c15 ^ s.Count*0xc2b2ae3d27d4eb4f
	h ^= uint64(s.Coll)<<56 ^ uint64(s.DType)<<48 ^ uint64(s.Op)<<40 ^ uint64(uint32(s.Root))
	h ^= h >> 32
	h *= 0xd6e8feb86659fd93
	return uint32(h>>32) | 1
}

func (s Signature) String() string {
	if s.Coll.Traits().Varies() {
		return fmt.Sprintf("%v of %d bytes (%v)", s.Coll, s.Count, s.DType)
	}
	what := s.Coll.String()
	if s.Coll.HasData() {
		what += fmt.Sprintf("(%v × %d", s.DType, s.Count)
		if s.Coll.Reduces() {
			what += fmt.Sprintf(", %v", s.Op)
		}
		if s.Root >= 0 {
			what += fmt.Sprintf(", root %d", s.Root)
		}
		what += ")"
	}
	return fmt.Sprintf("%s as collective %d", what, s.Seq)
}

// MismatchError says that a message of Peer belongs to another call than this rank's.
type MismatchError struct {
	Peer   int
	Mine   Signature
	Theirs *Signature // nil if unknown: a line carries only a tag
}

func (e *MismatchError) Error() string {
	if e.Theirs == nil {
		return fmt.Sprintf("this rank called %v, rank %d something else", e.Mine, e.Peer)
	}
	return fmt.Sprintf("this rank called %v, rank %d called %v", e.Mine, e.Peer, *e.Theirs)
}
