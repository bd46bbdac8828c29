package symm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"
)

// message is what ranks tell each other during a collective call. Fields that
// travel: kind, failed, call number, bytes, text; the descriptor beside them.
type message struct {
	kind   kind
	failed bool
	seq    uint64
	bytes  uint64
	text   string // why it failed
	fd     int    // -1: none; the receiver's to close
}

type kind uint8

const (
	kindOffer  kind = 1 // this is my memory
	kindMapped kind = 2 // I have mapped everyone's
	kindLeave  kind = 3 // I cannot go on
)

const (
	headLen = 1 + 1 + 8 + 8
	maxText = 1024
	maxFDs  = 8 // of a message that should have one
)

func (m message) encode() []byte {
	b := append(make([]byte, 0, headLen+len(m.text)), byte(m.kind), 0)
	if m.failed {
		b[1] = 1
	}
	b = binary.LittleEndian.AppendUint64(b, m.seq)
	b = binary.LittleEndian.AppendUint64(b, m.bytes)
	return append(b, m.text[:min(len(m.text), maxText)]...)
}

func decode(b []byte) (message, error) {
	if len(b) < headLen || len(b) > headLen+maxText || b[1] > 1 || b[0] < byte(kindOffer) || b[0] > byte(kindLeave) {
		return message{fd: -1}, fmt.Errorf("a message of %d bytes that is none of this protocol", len(b))
	}
	return message{
		kind: kind(b[0]), failed: b[1] == 1, fd: -1,
		seq: binary.LittleEndian.Uint64(b[2:]), bytes: binary.LittleEndian.Uint64(b[10:]),
		text: string(b[headLen:]),
	}, nil
}

func send(c *net.UnixConn, m message, fd int) error {
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	_, _, err := c.WriteMsgUnix(m.encode(), rights, nil)
	return err
}

// receive takes one message with at most one descriptor; whatever else came
// with it is closed. It comes close-on-exec.
func receive(c *net.UnixConn) (message, error) {
	b := make([]byte, headLen+maxText+1)
	oob := make([]byte, unix.CmsgSpace(4*maxFDs))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	fds := descriptors(oob[:oobn])
	m := message{fd: -1}
	switch {
	case gone(err) || err == nil && n == 0:
		err = errors.New("hung up; its process may be gone")
	case err == nil && len(fds) > 1:
		err = errors.New("sent several file descriptors at once")
	case err == nil && flags&unix.MSG_CTRUNC != 0:
		err = errors.New("sent a file descriptor that this process could not take: raise its limit of open files (ulimit -n)")
	case err == nil:
		m, err = decode(b[:n])
	}
	if err == nil && len(fds) == 1 {
		m.fd = fds[0]
		return m, nil
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	return m, err
}

// gone tells whether a socket's error means that the other end has closed it.
func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// descriptors are those in control messages, whatever else is in them.
func descriptors(oob []byte) (fds []int) {
	cmsgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range cmsgs {
		if len(cmsgs[i].Data)%4 != 0 {
			continue // the kernel makes none; ParseUnixRights would panic
		}
		if got, err := unix.ParseUnixRights(&cmsgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

func closeAll(ms []message) {
	for i := range ms {
		if ms[i].fd >= 0 {
			unix.Close(ms[i].fd)
			ms[i].fd = -1
		}
	}
}
