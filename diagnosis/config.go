package diagnosis

import "time"

// Config holds the engine's patience and thresholds. A zero field takes its
// default, so Config{} and DefaultConfig() mean the same.
type Config struct {
	// SuspectAfter is how long a collective must be open, and the blamed rank or
	// connection without progress, before a hang is suspected (1 s). It is
	// scaled by the communicator's history: see DurationFactor.
	SuspectAfter time.Duration
	// ConfirmAfter is the same for a confirmed hang when the evidence is firm: a
	// stopped or idle process, a stalled connection (2 s).
	ConfirmAfter time.Duration
	// IdleAfter is the same for a process in which nothing runs and that may as well be
	// in a pause of its own, longer than any before, or waits for a disk (10 s).
	IdleAfter time.Duration
	// GoneAfter is how long a process must be seen gone (0.5 s): survivors may
	// be shrinking the communicator already.
	GoneAfter time.Duration
	// DurationFactor × the usual longest duration of a communicator's operations
	// is its own SuspectAfter when that is longer (4), up to MaxSuspectAfter (10 s).
	DurationFactor  float64
	MaxSuspectAfter time.Duration
	// Grace is given to a rank that computes (30 s), or three times the longest
	// pause in the job's history, whichever is longer.
	Grace time.Duration
	// MaxPatience bounds the wait for a rank under an open mark (checkpoint,
	// evaluation, compile) or doing I/O while the job has no history of such a
	// pause (10 min). Once one has completed, Grace and three times the longest apply.
	MaxPatience time.Duration
	// LostAfter is how long others must be held up by ranks whose agent is lost
	// before their node is blamed as confirmed (10 s; suspected after half of it).
	LostAfter time.Duration
	// StartupPatience replaces SuspectAfter for soft evidence until a
	// communicator has finished StartupOps operations (30 s, 5): connecting,
	// compiling and loading are slow. Forming a communicator gets twice that.
	StartupPatience time.Duration
	StartupOps      uint64
	// StartPatience is how long a rank without any communicator may do nothing while all
	// others wait before it is suspected (1 min); a stopped or ended one is confirmed after
	// twice that, one that sleeps after five times.
	StartPatience time.Duration
	// ReportSlack is how far a node's state may be extrapolated beyond its last
	// report (250 ms): a starved agent must not make its ranks look stuck.
	ReportSlack time.Duration
	// Settle is how long a finding must stand before it is confirmed (250 ms);
	// HoldOff how long an incident outlives its last finding (600 ms).
	Settle, HoldOff time.Duration

	// A slow decision looks at one window: at least WindowSteps steps (2) when
	// the program marks them, else WindowOps operations a rank (16; a quarter of
	// them in a job without a pipeline) and two on every active communicator, and
	// at least MinWindow (200 ms).
	WindowSteps uint64
	WindowOps   uint64
	MinWindow   time.Duration
	// BaselineWindows is how many windows make a history (6).
	BaselineWindows int
	// A slow finding must hold for SuspectWindows (3) windows and SlowSuspectAfter
	// (1 s) in a row to be suspected, for ConfirmWindows (4) and SlowConfirmAfter
	// (2 s) to be confirmed, for twice as many while there is no history, and be
	// absent for RecoverWindows (3) in a row to end.
	SuspectWindows, ConfirmWindows, RecoverWindows int
	SlowSuspectAfter, SlowConfirmAfter             time.Duration
	// OwnRatio is how much a straggler's own time must exceed its history (1.5),
	// PeerRatio its peers' while there is no history (2), SlowShare which share
	// of the time the excess must cost (0.2; a slow connection, which every member
	// pays for, half of it).
	OwnRatio, PeerRatio, SlowShare float64
	// DelayRatio is how much a slow connection's delay must exceed its history
	// (2), DelayPeerRatio its peers' while there is none (3).
	DelayRatio, DelayPeerRatio float64
}

// DefaultConfig returns the defaults named at Config's fields.
func DefaultConfig() Config { return Config{}.withDefaults() }

func (c Config) withDefaults() Config {
	def(&c.SuspectAfter, time.Second)
	def(&c.ConfirmAfter, 2*time.Second)
	def(&c.IdleAfter, 10*time.Second)
	def(&c.GoneAfter, 500*time.Millisecond)
	def(&c.DurationFactor, 4)
	def(&c.MaxSuspectAfter, 10*time.Second)
	def(&c.Grace, 30*time.Second)
	def(&c.MaxPatience, 10*time.Minute)
	def(&c.LostAfter, 10*time.Second)
	def(&c.StartupPatience, 30*time.Second)
	def(&c.StartupOps, 5)
	def(&c.StartPatience, time.Minute)
	def(&c.ReportSlack, 250*time.Millisecond)
	def(&c.Settle, 250*time.Millisecond)
	def(&c.HoldOff, 600*time.Millisecond)
	def(&c.WindowSteps, 2)
	def(&c.WindowOps, 16)
	def(&c.MinWindow, 200*time.Millisecond)
	def(&c.BaselineWindows, 6)
	def(&c.SuspectWindows, 3)
	def(&c.ConfirmWindows, 4)
	def(&c.RecoverWindows, 3)
	def(&c.SlowSuspectAfter, time.Second)
	def(&c.SlowConfirmAfter, 2*time.Second)
	def(&c.OwnRatio, 1.5)
	def(&c.PeerRatio, 2)
	def(&c.SlowShare, 0.2)
	def(&c.DelayRatio, 2)
	def(&c.DelayPeerRatio, 3)
	return c
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
