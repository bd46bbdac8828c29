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
		return append([]byte{0}, (&message{kind: msgSwitch, epoch: epoch, received: received, alive: [MaxPaths]uint32{a, b}, willing: willing}).append(nil)...)
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
	f.Add(join(up, (&message{kind: msgDown, gen: 1}).append([]byte{0}), (&message{kind: msgFail, text: "why"}).append([]byte{0})))
	f.Fuzz(func(t *testing.T, in []byte) {
		n := &nobody{t: t}
		m := newMachine(shape{ring: 512, maxChunk: 128, depth: 16, table: 16, lanes: 2}, n)
		n.m = m
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
				i, p := int(b[0]>>1)%2, int(b[0]&1)
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
				b := next(1)[0]
				if wanted, _ := m.wants(int(b>>1)%2, int(b&1)); wanted {
					m.offer(int(b>>1)%2, int(b&1), endpoint{qp: 1, mtu: 5})
				}
			case 5:
				m.consume(min(m.arrived(), uint64(next(1)[0])))
				if m.lineHere() {
					m.consumeLine()
				}
				m.alignRecv()
				m.grant(op >= 10)
			case 6:
				b := next(1)[0]
				m.stopped(int(b>>1)%2, int(b&1))
				err = m.err
			case 7:
				b := next(1)[0]
				m.fault(int(b>>1)%2, int(b&1))
				err = m.err
			case 8:
				m.failback(int(next(1)[0]) % 2)
				err = m.err
			case 9:
				b := next(1)[0]
				m.sent(int(b>>1)%2, int(b&1), uint64(b>>2))
			}
			if m.arrived() > m.ring || m.credit() > m.ring {
				t.Fatalf("%d bytes arrived, %d of credit", m.arrived(), m.credit())
			}
		}
		if err != nil && !errors.Is(err, ErrCorrupt) && !failed {
			t.Fatal(err)
		}
	})
}

func TestMessages(t *testing.T) {
	at := endpoint{qp: 1, psn: 2, gid: [16]byte{3, 15: 4}, lid: 5, mtu: 6, inbox: 7, rkey: 8}
	for _, g := range []message{
		{kind: msgSwitch, lane: 1, epoch: 2, received: 3, alive: [MaxPaths]uint32{4, 5}},
		{kind: msgSwitch, lane: 15, epoch: 1, willing: true},
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
