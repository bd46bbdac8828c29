package bootstrap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// The protocol after connecting:
//
//	client  magic, version, token, nonce
//	server  magic, version, nonce, proof("server")
//	client  proof("client"), then frames: hello
//	server  frames: pending*, then roster, retry, or a failure
//
// Half of the client's nonce is its pass, an HMAC of the other half (the salt). It lets a
// listener under flood recognise a member by its first message, and keep it when unauthenticated
// connections are evicted. It proves nothing else, since it can be replayed.
//
// A member that has lost its connection sends resume instead of hello. The answer is resumed,
// and then the unacknowledged frames. The hub sends probe to a member's listener, and the
// answer is present. A process that does not have the session answers absent.
//
// A frame is a 4-byte length (of what follows), a type byte, and that type's fields. Integers
// are little-endian. Byte strings have a 4-byte length in front.
const (
	magic   = "LKSTEPbs"
	version = 2

	nonceSize    = 32
	saltSize     = 16 // of a client's nonce; the rest is its pass
	greetingSize = len(magic) + 2 + 16 + nonceSize
	answerSize   = len(magic) + 2 + nonceSize + 32

	// maxBlob is the largest MaxBlob, in bytes.
	maxBlob = 1 << 20
	// maxHello bounds a frame to the hub, in bytes.
	maxHello = maxBlob + 4096
	// maxFrame bounds a frame from the hub, in bytes. A gather's result has all members' blobs.
	maxFrame = 256 << 20
	// maxAddr bounds a rank's Member.Addr, in bytes.
	maxAddr = 512
	// maxReason bounds the reason of an abort, in bytes.
	maxReason = 4096
	// maxSize bounds a communicator, and so what a peer can make this rank allocate.
	maxSize = 1 << 16
)

// MaxBlob returns the largest blob that each of size ranks may give to AllGather, and the largest
// Info, in bytes. It is 1 MiB for up to 255 ranks. It is less for more ranks, because one frame
// carries all blobs.
func MaxBlob(size int) int {
	const beside = maxAddr + 64 // other bytes per rank: an address in the roster, and lengths
	return min(maxBlob, maxFrame/max(size, 1)-beside)
}

type frameType uint8

const (
	frameHello    frameType = iota + 1 // client → hub: rank, size, instance, address, info
	framePending                       // hub → client: ranks that are missing so far, fields of frameMissing
	frameRoster                        // hub → client: rank 0's instance, every member's address and info
	frameRetry                         // hub → client: no rendezvous of that token here yet
	frameConflict                      // hub → client: code, rank, detail
	frameMissing                       // hub → client: rejected, ranks, detail
	frameGather                        // client → hub: sequence, blob
	frameResult                        // hub → client: sequence, size blobs
	frameLost                          // hub → client: rank, reason
	frameAbort                         // both: rank, reason
	frameBye                           // both: the sender leaves
	frameLeft                          // hub → client: rank that left
	frameTell                          // client → hub: statement
	frameAck                           // both: number of frames received, acks not counted
	frameResume                        // client → hub, on another connection: fields of wanted
	frameResumed                       // hub → client: number of frames received
	frameProbe                         // hub → client's listener: fields of wanted
	framePresent                       // client → hub: the session exists
	frameAbsent                        // both: there is no such session
)

func appendU32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func appendU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }
func appendBytes[T []byte | string](b []byte, v T) []byte {
	return append(appendU32(b, uint32(len(v))), v...)
}

// frame starts a frame; seal completes it.
func frame(t frameType) []byte { return []byte{0, 0, 0, 0, byte(t)} }
func seal(b []byte) []byte {
	binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

// readFrame reads one frame of at most limit bytes, its length not counted. The buffer grows
// with the bytes that arrive, so a peer cannot make this rank allocate memory by a length alone.
func readFrame(r io.Reader, limit int) (frameType, fields, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, fields{}, err
	}
	n := int(binary.LittleEndian.Uint32(head[:]))
	if n < 1 || n > limit {
		return 0, fields{}, fmt.Errorf("%w: frame of %d bytes, limit %d", ErrProtocol, n, limit)
	}
	n--
	body := make([]byte, 0, min(n, 64<<10))
	for len(body) < n {
		step := min(n-len(body), max(64<<10, len(body)))
		at := len(body)
		body = append(body, make([]byte, step)...)
		if _, err := io.ReadFull(r, body[at:]); err != nil {
			return 0, fields{}, fmt.Errorf("frame cut short: %w", err)
		}
	}
	return frameType(head[4]), fields{b: body}, nil
}

// fields reads a frame's fields in order. If the frame is too short for a field, that field and
// all later ones read as zero, and ok reports false.
type fields struct {
	b   []byte
	bad bool
}

func (f *fields) take(n int) []byte {
	if f.bad || n < 0 || n > len(f.b) {
		f.bad = true
		return nil
	}
	v := f.b[:n:n]
	f.b = f.b[n:]
	return v
}

func (f *fields) u32() uint32 {
	if v := f.take(4); v != nil {
		return binary.LittleEndian.Uint32(v)
	}
	return 0
}

func (f *fields) u64() uint64 {
	if v := f.take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

func (f *fields) bytes() []byte { return f.take(int(f.u32())) }

// ok reports whether the frame had all fields that were read, and nothing else.
func (f *fields) ok() bool { return !f.bad && len(f.b) == 0 }

type hello struct {
	rank, size int
	instance   uint64 // random, of the Join call: tells a reconnect from a second process
	addr       string
	info       []byte
}

func (h hello) encode() []byte {
	b := frame(frameHello)
	b = appendU32(b, uint32(h.rank))
	b = appendU32(b, uint32(h.size))
	b = appendU64(b, h.instance)
	b = appendBytes(b, h.addr)
	return seal(appendBytes(b, h.info))
}

func decodeHello(f fields) (hello, bool) {
	h := hello{rank: int(int32(f.u32())), size: int(int32(f.u32())), instance: f.u64()}
	h.addr = string(f.bytes())
	h.info = f.bytes()
	return h, f.ok()
}

func encodeRoster(members []Member, hub uint64) []byte {
	b := appendU32(frame(frameRoster), uint32(len(members)))
	b = appendU64(b, hub)
	for _, m := range members {
		b = appendBytes(b, m.Addr)
		b = appendBytes(b, m.Info)
	}
	return seal(b)
}

func decodeRoster(f fields, size int) (members []Member, hub uint64, ok bool) {
	if int(f.u32()) != size {
		return nil, 0, false
	}
	hub = f.u64()
	members = make([]Member, size)
	for i := range members {
		members[i].Addr = string(f.bytes())
		members[i].Info = f.bytes()
	}
	return members, hub, f.ok()
}

func encodeRanks(b []byte, ranks []int) []byte {
	b = appendU32(b, uint32(len(ranks)))
	for _, r := range ranks {
		b = appendU32(b, uint32(r))
	}
	return b
}

func decodeRanks(f *fields, size int) []int {
	n := int(f.u32())
	if n > size {
		f.bad = true
		return nil
	}
	ranks := make([]int, n)
	for i := range ranks {
		ranks[i] = int(f.u32())
	}
	return ranks
}

// encodeFailure returns the frame for the error of a failed rendezvous.
func encodeFailure(err error) []byte {
	var conflict *ConflictError
	var lost *LostError
	var missing *MissingError
	switch {
	case errors.As(err, &conflict):
		code := 0
		for i, c := range conflictCodes {
			if i > 0 && errors.Is(conflict.Err, c) {
				code = i
			}
		}
		b := append(frame(frameConflict), byte(code))
		b = appendU32(b, uint32(conflict.Rank))
		return seal(appendBytes(b, conflict.Detail))
	case errors.As(err, &lost):
		return encodeLost(lost)
	case errors.As(err, &missing):
		return encodeMissing(frameMissing, missing)
	}
	return seal(frame(frameRetry))
}

func encodeMissing(t frameType, e *MissingError) []byte {
	b := appendU32(frame(t), uint32(e.Rejected))
	b = encodeRanks(b, e.Ranks)
	return seal(appendBytes(b, e.Detail))
}

func encodeLost(e *LostError) []byte {
	return seal(appendBytes(appendU32(frame(frameLost), uint32(e.Rank)), e.Reason))
}

func encodeAbort(e *AbortError) []byte {
	return seal(appendBytes(appendU32(frame(frameAbort), uint32(e.Rank)), e.Reason))
}

// decodeFailure is the inverse of encodeFailure. It returns nil if t is no failure or f is
// malformed.
func decodeFailure(t frameType, f fields, size int) error {
	switch t {
	case frameConflict:
		code := 0
		if v := f.take(1); v != nil {
			code = int(v[0])
		}
		e := &ConflictError{Rank: int(int32(f.u32())), Detail: string(f.bytes())}
		if !f.ok() || code == 0 || code >= len(conflictCodes) {
			return nil
		}
		e.Err = conflictCodes[code]
		return e
	case frameLost:
		e := &LostError{Rank: int(f.u32()), Reason: string(f.bytes())}
		if !f.ok() || e.Rank >= size {
			return nil
		}
		return e
	case frameMissing, framePending:
		e := &MissingError{Size: size, Rejected: int(f.u32())}
		e.Ranks = decodeRanks(&f, size)
		e.Detail = string(f.bytes())
		if !f.ok() {
			return nil
		}
		return e
	}
	return nil
}
