package pathplan

// Probe is what became of the probes over one path, or of one lane's packets.
type Probe struct {
	// Over are the links that a packet, and its answer where one is needed, had to cross:
	// hosts' access links too, where a prober wants those blamed rather than a leaf's.
	Over []Link
	Sent int
	Lost int
}

// Suspect is a link that is bad. Where several links explain the same losses, they are all
// in Links, in order of name: it is one of them, and the probes cannot tell which.
type Suspect struct {
	Links []Link
	Loss  float64 // most likely share of packets lost, 1: dead
	Sent  int     // probes over Links[0]
	Lost  int
}

// InferOptions say what counts as bad. Zero values are the defaults.
type InferOptions struct {
	Floor float64 // loss that is taken for noise; 0.0005
	Odds  float64 // how much likelier the losses must be with the link bad than well, as a natural logarithm; 12
}

// Infer returns the smallest set of bad links that explains which probes were lost and
// which were not, worst first. The order of probes does not matter.
func Infer(probes []Probe, o InferOptions) []Suspect { panic("not yet") }
