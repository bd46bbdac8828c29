package replay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"
)

const (
	magic      = "LSEV"
	version    = 1
	headerSize = 20

	codecStored = 0
	codecZstd   = 1
)

type frameKind uint8

const (
	kindHeader frameKind = iota + 1
	kindPart
	kindVerdicts
	kindMark
	numKinds
)

// maxRaw bounds what a frame holds, by kind: what a hostile one can make a reader allocate.
var maxRaw = [numKinds]uint32{kindHeader: 16 << 10, kindPart: 16 << 20, kindVerdicts: 256 << 10, kindMark: 16 << 10}

// worthPacking is the length from which a payload is compressed.
const worthPacking = 128

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrVersion is the error of a recording of another version of the format.
var ErrVersion = errors.New("recording of another version of the format")

// packer makes frames.
type packer struct {
	zstd  *zstd.Encoder
	raw   []byte
	frame []byte
}

func newPacker() (*packer, error) {
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderCRC(false), zstd.WithWindowSize(1<<20), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, err
	}
	return &packer{zstd: z}, nil
}

// pack returns a frame that is valid until the next call.
func (p *packer) pack(kind frameKind, m proto.Message) ([]byte, error) {
	var err error
	if p.raw, err = (proto.MarshalOptions{}).MarshalAppend(p.raw[:0], m); err != nil {
		return nil, fmt.Errorf("encode a frame: %w", err)
	}
	if len(p.raw) > int(maxRaw[kind]) {
		return nil, fmt.Errorf("encode a frame: it would hold %d bytes, at most %d can be read back", len(p.raw), maxRaw[kind])
	}
	f := append(p.frame[:0], magic...)
	f = append(f, version, byte(kind), codecStored, 0)
	f = append(f, make([]byte, headerSize-len(f))...)
	if len(p.raw) >= worthPacking {
		f[6] = codecZstd
		f = p.zstd.EncodeAll(p.raw, f)
	}
	if f[6] == codecStored || len(f)-headerSize >= len(p.raw) {
		f[6] = codecStored
		f = append(f[:headerSize], p.raw...)
	}
	finish(f, len(p.raw))
	p.frame = f
	return f, nil
}

// finish fills in what a frame's head says of the payload behind it.
func finish(f []byte, raw int) {
	binary.LittleEndian.PutUint32(f[8:], uint32(len(f)-headerSize))
	binary.LittleEndian.PutUint32(f[12:], uint32(raw))
	binary.LittleEndian.PutUint32(f[16:], checksum(f))
}

func checksum(frame []byte) uint32 {
	return crc32.Update(crc32.Checksum(frame[:16], castagnoli), castagnoli, frame[headerSize:])
}

// errDamaged is the error of a frame that is torn or is none.
var errDamaged = errors.New("damaged frame")

// unpacker reads frames.
type unpacker struct {
	zstd *zstd.Decoder
	buf  []byte
	raw  []byte
}

func newUnpacker() (*unpacker, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(uint64(maxRaw[kindPart])),
		zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	return &unpacker{zstd: z}, nil
}

// next returns the next frame's kind, its raw content (valid until the next
// call) and its length in the file. io.EOF: there is none; errDamaged: there is
// something else.
func (u *unpacker) next(r io.Reader) (kind frameKind, raw []byte, n int64, err error) {
	u.buf = grown(u.buf, headerSize)
	switch got, err := io.ReadFull(r, u.buf); {
	case errors.Is(err, io.EOF):
		return 0, nil, 0, io.EOF
	case errors.Is(err, io.ErrUnexpectedEOF):
		return 0, nil, int64(got), errDamaged
	case err != nil:
		return 0, nil, 0, err
	}
	kind, stored, size, err := frameHeader(u.buf)
	if err != nil {
		return 0, nil, 0, err
	}
	// The buffer grows with what there is, not with what is claimed.
	for have := 0; have < int(stored); {
		step := min(int(stored)-have, 1<<18)
		u.buf = grown(u.buf, headerSize+have+step)
		got, err := io.ReadFull(r, u.buf[headerSize+have:])
		have += got
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return 0, nil, int64(headerSize + have), errDamaged
		}
		if err != nil {
			return 0, nil, 0, err
		}
	}
	n = int64(len(u.buf))
	if checksum(u.buf) != binary.LittleEndian.Uint32(u.buf[16:]) {
		return 0, nil, 0, errDamaged
	}
	payload := u.buf[headerSize:]
	if u.buf[6] == codecStored {
		if len(payload) != int(size) {
			return 0, nil, 0, errDamaged
		}
		return kind, payload, n, nil
	}
	if cap(u.raw) < int(size) || cap(u.raw) == 0 {
		u.raw = make([]byte, 0, max(size, 1))
	}
	out, err := u.zstd.DecodeAll(payload, u.raw[:0:max(size, 1)])
	if err != nil || len(out) != int(size) {
		return 0, nil, 0, errDamaged
	}
	return kind, out, n, nil
}

// frameHeader checks the first headerSize bytes of a frame.
func frameHeader(b []byte) (kind frameKind, stored, size uint32, err error) {
	if string(b[:4]) != magic {
		return 0, 0, 0, errDamaged
	}
	if b[4] != version {
		return 0, 0, 0, fmt.Errorf("%w: %d, this program reads %d", ErrVersion, b[4], version)
	}
	kind = frameKind(b[5])
	stored, size = binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])
	if kind == 0 || kind >= numKinds || b[6] > codecZstd || b[7] != 0 || size > maxRaw[kind] || stored > size {
		return 0, 0, 0, errDamaged
	}
	return kind, stored, size, nil
}

func grown(b []byte, n int) []byte {
	if cap(b) >= n {
		return b[:n]
	}
	return append(b, make([]byte, n-len(b))...)
}
