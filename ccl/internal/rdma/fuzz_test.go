package rdma

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
)

// nobody carries out nothing, and checks that a machine asks for sane things.
type nobody struct {
	t *testing.T
	m *machine
}

func (n *nobody) post(lane, path int, s uint64, e *entry) {
	l := &n.m.lanes[lane]
	if l.paths[path].state != pathLive || s >= l.posted || s < l.acked {
		n.t.Fatalf("message %d posted to path %d in state %d, posted %d, acknowledged %d", s, path, l.paths[path].state, l.posted, l.acked)
	}
	if e.kind == kindData && (e.pos%n.m.ring+uint64(e.n) > n.m.ring || e.pos+uint64(e.n) > n.m.tx.sent) {
		n.t.Fatalf("%d bytes at %d", e.n, e.pos)
	}
}
func (n *nobody) credit(int, int, block)             {}
func (n *nobody) chosen(_, _ int)                    {}
func (n *nobody) stop(int, int, bool)                {}
func (n *nobody) drop(int, int)                      {}
func (n *nobody) connect(_, _ int, at endpoint) bool { return at.qp%7 != 0 }
func (n *nobody) tell(*message)                      {}
func (n *nobody) switched(_, _, _ int, _, _ uint64)  {}

// FuzzPeer gives one end whatever a peer can send: control messages, immediate
// words with lengths, credit; and uses it. A peer that does what no correct one
// does ends its connection with ErrCorrupt, and does no other harm.
func FuzzPeer(f *testing.F) {
	offer := func(lane, path uint8, gen uint32) []byte {
		return append([]byte{0}, (&message{kind: msgOffer, lane: lane, path: path, gen: gen, at: endpoint{qp: 1, mtu: 5}}).append(nil)...)
	}
	switching := func(epoch uint32, received uint64, a, b uint32, willing bool) []byte {
		return append([]byte{0}, (&message{kind: msgSwitch, epoch: epoch, received: received, alive: [maxPlaces]uint32{a, b}, willing: willing}).append(nil)...)
	}
	change := func(epoch uint32, received uint64, a, b uint32) []byte {
		return switching(epoch, received, a, b, false)
	}
	data := func(imm, n uint32) []byte {
		return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32([]byte{1, 0}, imm), n)
	}
	join := func(parts ...[]byte) (b []byte) {
		for _, p := range parts {
			b = append(b, p...)
		}
		return b
	}
	up := join([]byte{4, 0, 4, 1}, offer(0, 0, 1), offer(0, 1, 1), change(1, 0, 1, 1))
	f.Add(up)
	f.Add(join(up, []byte{3, 200, 3, 9}, data(0, 100), data(1, 28), data(1<<30, 64), data(2<<30, 0), []byte{5, 40}, change(2, 1, 0, 1), []byte{6, 0}))
	f.Add(join(up, data(3<<30, 100), data(3<<30|1, 28), []byte{5, 40}, data(3<<30|2, 0)))
	f.Add(join(up, []byte{7, 0}, change(2, 0, 0, 1), []byte{6, 0}, data(0, 10), offer(0, 0, 2), []byte{4, 0, 8, 0}))
	// Onto the backup by a fault, and back by choice; a reason that there is not.
	back := join(up, []byte{7, 0}, change(2, 0, 0, 1), []byte{6, 0, 4, 0}, offer(0, 0, 2), switching(3, 0, 2, 1, true))
	f.Add(join(back, []byte{6, 1, 4, 1}, offer(0, 1, 2), []byte{3, 200}))
	f.Add(append(back[:len(back)-1:len(back)-1], 2))
	// To the other queue pair of the path, and back.
	move := func(epoch uint32, received uint64, alive ...uint32) []byte {
		g := message{kind: msgSwitch, epoch: epoch, received: received, spares: true, willing: epoch > 1}
		copy(g.alive[:], alive)
		return append([]byte{0}, g.append(nil)...)
	}
	two := join([]byte{4, 0, 4, 4}, offer(0, 0, 1), offer(0, 2, 1), move(1, 0, 1, 0, 1))
	f.Add(join(two, []byte{3, 200, 4, 1}, offer(0, 1, 1), move(2, 1, 0, 1, 1), []byte{6, 0, 3, 9, 4, 0}, offer(0, 0, 2), []byte{8, 0, 6, 1}, move(3, 2, 2, 0, 1), data(0, 10)))
	f.Add(join(two, move(2, 0, 1), change(2, 0, 0, 1)))
	f.Add(join(up, (&message{kind: msgDown, gen: 1}).append([]byte{0}), (&message{kind: msgFail, text: "why"}).append([]byte{0})))
	f.Fuzz(func(t *testing.T, in []byte) {
		fuzzPeer(t, in, false)
		fuzzPeer(t, in, true)
	})
}

// fuzzPeer is FuzzPeer of a connection that has one queue pair a path, or two.
func fuzzPeer(t *testing.T, in []byte, spares bool) {
	n := &nobody{t: t}
	m := newMachine(shape{ring: 512, maxChunk: 128, depth: 16, table: 16, lanes: 2, spares: spares}, n)
	n.m = m
	at := func(b byte) (lane, place int) {
		if spares {
			return int(b>>1) % 2, int(b&1 | b>>1&2)
		}
		return int(b>>1) % 2, int(b & 1)
	}
	next := func(k int) []byte {
		b := make([]byte, k)
		copy(b, in)
		in = in[min(k, len(in)):]
		return b
	}
	var err error
	failed := false
	for len(in) > 1 && err == nil {
		switch op := next(1)[0]; op % 10 {
		case 0:
			k, size, e := parseFrame(next(frameHeader))
			if err = e; e == nil {
				var g message
				if g, err = parseBody(k, next(size)); err == nil {
					err = m.handle(&g)
					failed = k == msgFail
				}
			}
		case 1:
			b := next(9)
			i, p := at(b[0])
			err = m.arrive(i, p, binary.LittleEndian.Uint32(b[1:]), binary.LittleEndian.Uint32(b[5:]))
		case 2:
			b := next(33)
			le := binary.LittleEndian
			err = m.credited(int(b[0])%2, block{le.Uint64(b[1:]), le.Uint64(b[9:]), le.Uint64(b[17:]), le.Uint64(b[25:])})
		case 3:
			if size, lane, _ := m.chunk(uint64(next(1)[0])); size > 0 {
				m.send(lane, size, source{})
			}
			if lane, _ := m.line(); lane >= 0 {
				m.sendLine(lane)
			}
			m.alignSend()
		case 4:
			i, p := at(next(1)[0])
			if wanted, _ := m.wants(i, p); wanted {
				m.offer(i, p, endpoint{qp: 1, mtu: 5})
			}
		case 5:
			m.consume(min(m.arrived(), uint64(next(1)[0])))
			if m.lineHere() {
				m.consumeLine()
			}
			m.alignRecv()
			m.grant(op >= 10)
		case 6:
			m.stopped(at(next(1)[0]))
			err = m.err
		case 7:
			m.fault(at(next(1)[0]))
			err = m.err
		case 8:
			m.failback(int(next(1)[0]) % 2)
			err = m.err
		case 9:
			b := next(1)[0]
			i, p := at(b)
			m.sent(i, p, uint64(b>>2))
		}
		if m.arrived() > m.ring || m.credit() > m.ring {
			t.Fatalf("%d bytes arrived, %d of credit", m.arrived(), m.credit())
		}
	}
	if err != nil && !errors.Is(err, ErrCorrupt) && !failed {
		t.Fatal(err)
	}
}

func TestMessages(t *testing.T) {
	at := endpoint{qp: 1, psn: 2, gid: [16]byte{3, 15: 4}, lid: 5, mtu: 6, inbox: 7, rkey: 8}
	for _, g := range []message{
		{kind: msgSwitch, lane: 1, epoch: 2, received: 3, alive: [maxPlaces]uint32{4, 5}},
		{kind: msgSwitch, lane: 15, epoch: 1, willing: true},
		{kind: msgSwitch, lane: 3, epoch: 7, received: 9, spares: true, alive: [maxPlaces]uint32{4, 5, 6, 7}},
		{kind: msgOffer, lane: 1, path: 1, gen: 9, at: at},
		{kind: msgDown, lane: 3, path: 1, gen: 4},
		{kind: msgExpired, lane: 2},
		{kind: msgFail, path: 1, text: "because"},
		{kind: msgFail},
	} {
		b := g.append(nil)
		k, n, err := parseFrame(b[:frameHeader])
		if err != nil || n != len(b)-frameHeader {
			t.Fatalf("%+v: %d bytes, %v", g, n, err)
		}
		if got, err := parseBody(k, b[frameHeader:]); got != g || err != nil {
			t.Errorf("%+v came back as %+v, %v", g, got, err)
		}
	}
	long := message{kind: msgFail, text: string(make([]byte, 2*maxMessage))}
	if _, n, err := parseFrame(long.append(nil)); err != nil || n != maxMessage {
		t.Errorf("a long reason: %d bytes, %v", n, err)
	}
	b := (&message{kind: msgSwitch, willing: true}).append(nil)
	b[len(b)-1] = 2
	if _, err := parseBody(msgSwitch, b[frameHeader:]); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a SWITCH for reason 2: %v", err)
	}
	for _, b := range [][]byte{{0, 0, 1, 4}, {0, 0, 3, 0}, {0, 0, 3, 99}, {0, 0, 3, byte(msgSwitch)}, {255, 255, 3, byte(msgFail)}} {
		if _, _, err := parseFrame(b); !errors.Is(err, ErrCorrupt) {
			t.Errorf("frame %v: %v", b, err)
		}
	}
}

func seeded(seed uint64) func(int) int {
	r := rand.New(rand.NewPCG(seed, 1))
	return r.IntN
}
