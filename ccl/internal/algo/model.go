package algo

import (
	"math"

	"github.com/lockstep-ccl/lockstep/record"
)

// Path is the cost of one kind of connection, in ns of one rank's time.
type Path struct {
	Line    float64 // one low-latency line, sent and received
	Msg     float64 // one message of the byte stream, sent and received
	Byte    float64 // each byte of the stream, sent and received
	Latency float64 // from the sender's store until the receiver sees it
}

// Model estimates how long a call takes, from latency, bandwidth and reduction. If ranks
// outnumber cores, it adds the time to schedule a rank again after a wait, which then dominates.
type Model struct {
	Intra, Inter Path
	Reduce       float64 // ns per byte reduced
	Switch       float64 // ns for a round trip through the scheduler, if ranks outnumber cores
}

// DefaultModel returns a model that was fitted on two cores of a 2024 server. Choose depends
// only on the ratios of its terms.
func DefaultModel() Model {
	return Model{
		Intra:  Path{Line: 70, Msg: 250, Byte: 0.14, Latency: 120},
		Inter:  Path{Line: 9000, Msg: 9000, Byte: 0.5, Latency: 12000},
		Reduce: 0.05,
		Switch: 4000,
	}
}

const (
	linePayload = 48 // bytes that a low-latency line carries
	maxLines    = 32 // of one message: it must fit into what a connection buffers
)

type estimate struct {
	ns    float64
	proto record.Proto
	block int
}

// Blocks are small enough to stay in the second-level cache from one stage to the next.
const (
	intraBlock = 32 << 10
	interBlock = 128 << 10
)

// halvingBytes is the vector size from which allReduceDoubling halves first, if it can. Halving
// sends less and takes twice the rounds.
const halvingBytes = 16 << 10

// rounds estimates an algorithm of dependent rounds. In each round a rank exchanges intra messages
// within the node and inter messages with other nodes, of size bytes each. It reduces the given
// number of bytes in all. rounds picks the faster protocol.
func (m *Model) rounds(p *Place, rounds, intra, inter float64, size int, reduced float64) estimate {
	crowd := math.Max(1, float64(p.Most)/float64(p.Cores))
	lines := math.Ceil(math.Max(float64(size), 1) / linePayload)
	cost := func(msg func(Path) float64) float64 {
		ns := (intra*msg(m.Intra) + inter*msg(m.Inter)) * crowd
		if inter > 0 {
			ns += m.Inter.Latency
		} else {
			ns += m.Intra.Latency
		}
		if crowd > 1 {
			ns += m.Switch * crowd
		}
		return rounds*ns + reduced*m.Reduce*crowd
	}
	stream := cost(func(l Path) float64 { return l.Msg + l.Byte*float64(size) })
	block := intraBlock
	if inter > 0 {
		block = interBlock
	}
	e := estimate{ns: stream, proto: record.ProtoSimple, block: block}
	if lines <= maxLines {
		if ll := cost(func(l Path) float64 { return l.Line * lines }); ll < stream {
			e.ns, e.proto = ll, record.ProtoLL
		}
	}
	return e
}

func log2ceil(n int) float64 { return math.Ceil(math.Log2(float64(n))) }

// peers counts a rank's peers when all exchange with all. It takes the largest count of any rank, so
// that all ranks get the same estimate.
func (p *Place) peers() (intra, inter float64) {
	return float64(p.Most - 1), float64(p.Size - p.Least)
}

// neighbour counts one message to a ring neighbour. If any ring link crosses nodes, it counts as
// one between nodes, because the slowest link sets the pace.
func (p *Place) neighbour() (intra, inter float64) {
	if p.Nodes > 1 {
		return 0, 1
	}
	return 1, 0
}

func (m *Model) oneShot(c *Call, p *Place) estimate {
	intra, inter := p.peers()
	return m.rounds(p, 1, intra, inter, c.bytes(), float64(p.Size-1)*float64(c.bytes()))
}

func (m *Model) doubling(c *Call, p *Place) estimate {
	intra, inter := p.neighbour()
	rounds, size := log2ceil(p.Size), c.bytes()
	pow2 := p.Size&(p.Size-1) == 0
	if !pow2 {
		rounds++
	}
	if c.Coll == record.AllReduce && pow2 && size >= halvingBytes {
		return m.rounds(p, 2*rounds, intra, inter, int(float64(size)*float64(p.Size-1)/float64(p.Size)/rounds), float64(size))
	}
	return m.rounds(p, rounds, intra, inter, size, rounds*float64(size))
}

func (m *Model) staged(c *Call, p *Place) estimate {
	var sum estimate
	size := c.bytes()
	for _, group := range p.levels() {
		k := len(group)
		var intra, inter float64
		if p.Node[group[k-1]] == p.Node[group[0]] {
			intra = float64(k - 1)
		} else {
			inter = float64(k - 1)
		}
		e := m.rounds(p, 2, intra, inter, (size+k-1)/k, float64(size))
		sum.ns += e.ns
		sum.block = max(sum.block, e.block)
		if sum.proto == record.ProtoNone || e.proto == record.ProtoSimple {
			sum.proto = e.proto
		}
		size = (size + k - 1) / k
	}
	return sum
}

func (m *Model) ring(c *Call, p *Place) estimate {
	intra, inter := p.neighbour()
	return m.rounds(p, float64(2*(p.Size-1)), intra, inter, (c.bytes()+p.Size-1)/p.Size, float64(c.bytes()))
}

func (m *Model) halfRing(c *Call, p *Place) estimate {
	intra, inter := p.neighbour()
	return m.rounds(p, float64(p.Size-1), intra, inter, c.bytes(), float64(p.Size-1)*float64(c.bytes()))
}

func (m *Model) exchange(c *Call, p *Place) estimate {
	intra, inter := p.peers()
	return m.rounds(p, 1, intra, inter, c.bytes(), float64(p.Size-1)*float64(c.bytes()))
}

func (m *Model) star(c *Call, p *Place) estimate {
	intra, inter := p.peers()
	reduced := 0.0
	if c.Coll.Reduces() {
		reduced = float64(p.Size-1) * float64(c.bytes())
	}
	return m.rounds(p, 1, intra, inter, c.bytes(), reduced)
}

func (m *Model) tree(c *Call, p *Place) estimate {
	intra, inter := p.neighbour()
	return m.rounds(p, log2ceil(p.Size), intra, inter, c.bytes(), float64(c.bytes()))
}

// chain estimates pipeline time plus the time for the first block to reach the end of the chain.
func (m *Model) chain(c *Call, p *Place) estimate {
	intra, inter := p.neighbour()
	e := m.rounds(p, 1, 2*intra, 2*inter, c.bytes(), float64(c.bytes()))
	fill := m.rounds(p, float64(p.Size-2), intra, inter, min(c.bytes(), e.block), 0)
	e.ns += fill.ns
	e.proto = record.ProtoSimple
	return e
}
