package agent

// sampling picks the collectives whose arrivals are reported, so that all
// members pick the same ones with nothing exchanged: those whose hash has
// enough zero bits at its end. Members that disagree on how many (their rates
// are measured apart) still share every pick of the stricter one.
type sampling struct {
	zeros uint   // bits that must be zero
	seen  uint64 // collectives since the last tune
}

// take reports whether a collective is picked.
func (s *sampling) take(commID, seq uint64) bool {
	s.seen++
	h := (commID ^ seq*0x9e3779b97f4a7c15) * 0xd6e8feb86659fd93
	h ^= h >> 32
	h *= 0xd6e8feb86659fd93
	h ^= h >> 32
	return h&(1<<s.zeros-1) == 0
}

// tune is called about once a second with the number of picks wanted in a second.
func (s *sampling) tune(seconds float64, wanted uint32) {
	rate := float64(s.seen) / seconds
	s.seen = 0
	s.zeros = 0
	for rate > float64(max(wanted, 1)) && s.zeros < 32 {
		rate /= 2
		s.zeros++
	}
}
