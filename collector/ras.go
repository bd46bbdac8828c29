package collector

// RAS is what NCCL's own RAS has answered: second evidence, gathered by NCCL's
// processes among themselves. It is not changed once it is published.
type RAS struct {
	At      int64  // CLOCK_MONOTONIC ns when it was asked
	Version string // NCCL's, "" when it does not say
	Comms   []RASComm
}

// RASComm is what RAS knows of one communicator. Ranks are the communicator's.
type RASComm struct {
	ID      uint64    // NCCL's hash of it, which the profiler plugin records too
	Size    int32     // 0 when the answer does not say
	Missing []RASRank // did not answer RAS, at most MaxRASRanks
	// Behind are ranks that have launched fewer operations of a kind than others, at most MaxRASRanks.
	Behind []RASBehind
	// More says that there are more of either.
	More bool
}

// RASRank is a rank that RAS misses.
type RASRank struct {
	Rank int32
	PID  int32 // 0 when unknown
	Dead bool  // RAS has given it up; else it does not answer
}

// RASBehind is a rank that has launched fewer operations than another one.
type RASBehind struct {
	Rank     int32
	Coll     string // NCCL's word; "" before NCCL 2.26, which counts all kinds together
	Launched uint64
	Most     uint64 // of any rank
}

// MaxRASComms and MaxRASRanks bound what is kept of an answer.
const (
	MaxRASComms = 256
	MaxRASRanks = 16
)

// Miss and FallBehind add a rank, as far as there is room.
func (c *RASComm) Miss(r RASRank) {
	switch {
	case r.Rank < 0:
	case len(c.Missing) == MaxRASRanks:
		c.More = true
	default:
		c.Missing = append(c.Missing, r)
	}
}

func (c *RASComm) FallBehind(b RASBehind) {
	switch {
	case b.Rank < 0:
	case len(c.Behind) == MaxRASRanks:
		c.More = true
	default:
		c.Behind = append(c.Behind, b)
	}
}
