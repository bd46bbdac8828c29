package transport

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

const (
	dataMagic    = "LKSTEPd4"
	controlMagic = "LKSTEPr3" // of a socket beside RDMA
	dataBody     = 8 + 8 + 4 + 4 + 2 + 2 + 16 + 4 + 16
	dataHello    = dataBody + sha256.Size
	dataReply    = 1 + 4 + sha256.Size
	dataTimeout  = 5 * time.Second

	replyOK    = 1
	replyBusy  = 2 // the peer's own attempt stands
	replyStale = 3 // the peer knows of a later attempt; the reply has its number
	replyOver  = 4 // the peer has given the link up
)

// hello is the first thing on each data socket, from the side that dialled.
type dataGreeting struct {
	src, dst     int
	index, total int
	attempt      [16]byte
	number       uint32
	once         [16]byte // random: no two greetings are alike
	halves, move bool     // see halvesFlag, moveFlag
}

func (n *network) encode(g dataGreeting) []byte {
	b := append(make([]byte, 0, dataHello), n.magic(g.dst)...)
	b = binary.LittleEndian.AppendUint64(b, n.m.cfg.ID)
	b = binary.LittleEndian.AppendUint32(b, uint32(g.src))
	b = binary.LittleEndian.AppendUint32(b, uint32(g.dst))
	b = binary.LittleEndian.AppendUint16(b, uint16(g.index))
	b = binary.LittleEndian.AppendUint16(b, uint16(g.total|flag(g.halves, halvesFlag)|flag(g.move, moveFlag)))
	b = append(b, g.attempt[:]...)
	b = binary.LittleEndian.AppendUint32(b, g.number)
	b = append(b, g.once[:]...)
	return append(b, n.prove("hello", n.m.infos[g.dst].Nonce, b)...)
}

func flag(set bool, bit int) int {
	if set {
		return bit
	}
	return 0
}

// prove is knowledge of the communicator's key, for one listener and one message.
func (n *network) prove(what string, nonce [16]byte, msg []byte) []byte {
	h := hmac.New(sha256.New, n.m.cfg.Key)
	io.WriteString(h, what)
	h.Write(nonce[:])
	h.Write(msg)
	return h.Sum(nil)
}

func (n *network) decode(b []byte) (g dataGreeting, err error) {
	le := binary.LittleEndian
	body, proof := b[:dataBody], b[dataBody:]
	if !hmac.Equal(proof, n.prove("hello", n.nonce, body)) {
		return g, errUnproved
	}
	g = dataGreeting{src: int(le.Uint32(b[16:])), dst: int(le.Uint32(b[20:])), index: int(le.Uint16(b[24:])), total: int(le.Uint16(b[26:]) &^ (halvesFlag | moveFlag)), attempt: [16]byte(b[28:44]), number: le.Uint32(b[44:]), once: [16]byte(b[48:])}
	g.halves, g.move = le.Uint16(b[26:])&halvesFlag != 0, le.Uint16(b[26:])&moveFlag != 0
	if le.Uint64(b[8:]) != n.m.cfg.ID || g.dst != n.m.cfg.Rank || g.src >= n.m.cfg.Size || g.src == g.dst || g.total < 1 || g.total > maxSockets || g.index >= g.total || g.halves && g.total < 2 || g.number == 0 || g.number > maxNumber || string(b[:8]) != n.magic(g.src) {
		return g, fmt.Errorf("%w: greeting from rank %d to rank %d, socket %d of %d", ErrCorrupt, g.src, g.dst, g.index, g.total)
	}
	return g, nil
}

var errUnproved = errors.New("not a member of this communicator")

const (
	maxSockets = 16
	// maxNumber is more attempts than there can be in a year.
	maxNumber = 1 << 30
)

// encodeReply answers a greeting; number is that of the latest attempt here.
func (n *network) encodeReply(hello []byte, status byte, number uint32) []byte {
	b := binary.LittleEndian.AppendUint32([]byte{status}, number)
	return append(b, n.prove("reply", n.nonce, append(slices.Clone(hello), b...))...)
}

func (n *network) decodeReply(peer int, hello, b []byte) (status byte, number uint32, err error) {
	if !hmac.Equal(b[5:], n.prove("reply", n.m.infos[peer].Nonce, append(slices.Clone(hello), b[:5]...))) {
		return 0, 0, fmt.Errorf("%w: it does not know the communicator's key", ErrCorrupt)
	}
	status, number = b[0], binary.LittleEndian.Uint32(b[1:])
	if status < replyOK || status > replyOver || number > maxNumber {
		return 0, 0, fmt.Errorf("%w: reply %d, attempt %d", ErrCorrupt, status, number)
	}
	return status, number, nil
}

// serve authenticates one accepted connection and gives its socket to its link.
func (n *network) serve(conn *accept.Conn) {
	var b [dataHello]byte
	g, err := n.readGreeting(conn, b[:])
	if err != nil {
		return
	}
	conn.Authenticated()
	conn.SetDeadline(time.Now().Add(dataTimeout))
	l := n.peer(g.src)
	t := l.connecting()
	t.mu.Lock()
	status, latest := n.judge(l, g), max(t.whole, t.number)
	var fd int
	if status == replyOK {
		if fd, err = detach(conn.Conn); err != nil {
			t.mu.Unlock()
			return
		}
	}
	t.mu.Unlock()
	if _, err := conn.Write(n.encodeReply(b[:], status, latest)); err != nil || status != replyOK {
		if status == replyOK {
			unix.Close(fd)
		}
		return
	}
	n.add(l, g, fd)
	n.answer(l, g)
}

// readGreeting reads the first message of a connection, which has a proof, into b. If it is not valid,
// the connection counts as refused.
func (n *network) readGreeting(conn *accept.Conn, b []byte) (g dataGreeting, err error) {
	conn.SetDeadline(time.Now().Add(accept.FirstTimeout))
	// One read takes all that has arrived. The rest of a greeting alone would look invalid.
	got, err := io.ReadAtLeast(conn, b, len(dataMagic))
	if err == nil {
		if m := string(b[:len(dataMagic)]); m != dataMagic && m != controlMagic {
			conn.Refuse(accept.Garbage)
			return g, errUnproved
		}
		_, err = io.ReadFull(conn, b[got:])
	}
	if err != nil {
		if got > 0 || errors.Is(err, os.ErrDeadlineExceeded) { // a port check connects and hangs up; it is not counted
			conn.Refuse(accept.Silent)
		}
		return g, err
	}
	if g, err = n.decode(b); err != nil {
		conn.Refuse(accept.Unproved)
		return g, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.heard.Add([sha256.Size]byte(b[dataBody:])) {
		conn.Refuse(accept.Replayed)
		return g, errUnproved
	}
	return g, nil
}

// inspect reports whether a connection's first bytes are a greeting with a valid proof. Those of a
// replay are, too, and readGreeting refuses it.
func (n *network) inspect(b []byte) accept.Inspection {
	if len(b) < len(dataMagic) {
		return accept.Incomplete
	}
	if m := string(b[:len(dataMagic)]); m != dataMagic && m != controlMagic {
		return accept.Invalid
	}
	if len(b) < dataHello {
		return accept.Incomplete
	}
	if _, err := n.decode(b); err == nil {
		return accept.Plausible
	}
	return accept.Invalid
}

// judge decides on a peer's attempt to connect, which takes the place of any other when
// it is to stand. The connector's lock is held.
func (n *network) judge(l remote, g dataGreeting) byte {
	t := l.connecting()
	switch {
	case t.over.Load():
		return replyOver
	case t.whole > 0 && n.m.overRDMA(g.src):
		return replyBusy // its rails look after themselves
	case g.number <= t.whole:
		return replyStale
	case t.attempt == g.attempt:
	case g.halves && g.index >= g.total/2:
		return replyStale // the half of an attempt of ours, which is withdrawn
	case t.dialing && (t.number > g.number || t.number == g.number && n.m.cfg.Rank < g.src):
		return replyBusy
	case !t.dialing && g.number <= t.number && t.attempt != [16]byte{}:
		return replyStale
	default:
		t.discard()
		t.attempt, t.number, t.dialing, t.theirs = g.attempt, g.number, false, record.Now()
	}
	if len(t.pending) > 0 && len(t.pending) != g.total {
		return replyBusy
	}
	return replyOK
}

// dial connects all sockets to a peer for the first time, unless the peer's own attempt
// stands. It gives up when nothing comes from the peer's host for Config.Outage.
func (n *network) dial(l remote, rank int, attempt [16]byte) error {
	t := l.connecting()
	number := uint32(1)
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		t.mu.Lock()
		ours := t.attempt == attempt && t.whole == 0
		if t.tries == 0 {
			t.hears() // from here on
		}
		t.try()
		tries, quiet, last := t.tries-1, t.silent, t.last
		t.mu.Unlock()
		if !ours {
			return nil
		}
		if quiet >= n.m.cfg.Outage {
			return n.unheard(rank, tries, quiet, last)
		}
		status, theirs, err := n.connect(n.m.ctx, l, rank, attempt, number)
		switch {
		case err != nil:
			// Whoever is gone refuses; all else may pass.
			if n.m.ctx.Err() != nil || n.m.cfg.Err() != nil || errors.Is(err, syscall.ECONNREFUSED) {
				return err
			}
			t.mu.Lock()
			t.last = err
			t.mu.Unlock()
		case status == replyOver:
			return errOver
		case status == replyBusy:
			t.withdraw(attempt)
			return nil
		case status == replyStale: // it has all sockets of this one, and its last answers were lost
			attempt, number = t.renew(attempt, theirs)
		default:
			t.mu.Lock()
			half := t.attempt == attempt && t.whole < number
			t.mu.Unlock()
			if !half {
				return nil
			}
			attempt, number = t.renew(attempt, number)
		}
		n.pause(wait/2 + rand.N(wait))
	}
}

// withdraw gives an attempt up, so that the peer's may stand.
func (t *connector) withdraw(attempt [16]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.attempt == attempt && t.whole < t.number {
		t.discard()
		t.attempt, t.dialing = [16]byte{}, false
	}
}

// renew makes an attempt that is later than the peer's latest of the one given.
func (t *connector) renew(attempt [16]byte, theirs uint32) ([16]byte, uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.attempt == attempt && t.whole < t.number {
		t.discard()
		t.attempt, t.number = newNonce(), max(t.number, theirs)+1
		return t.attempt, t.number
	}
	return attempt, t.number
}
