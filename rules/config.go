package rules

import (
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Config holds what an operator may want otherwise. Start from DefaultConfig.
type Config struct {
	// VerdictInterval is how often verdicts become alerts. It adds to the time
	// from fault to action, and its rules are cheap.
	VerdictInterval time.Duration
	// Interval is how often all other rules are evaluated.
	Interval time.Duration
	// Window is the range of rates, at least four scrape intervals.
	Window time.Duration

	// SuspectedFor is how long a fault stays suspected before that is an alert;
	// most are confirmed or gone sooner.
	SuspectedFor time.Duration
	// DownFor is how long a component is down before that is an alert, Memory
	// for how long it is remembered which component a target was.
	DownFor, Memory time.Duration
	// TroubleFor is the same for troubles that the pipeline survives.
	TroubleFor time.Duration
	// CertificateSoon is how long before its end a certificate that was not replaced is an alert.
	CertificateSoon time.Duration
	// StuckFor is how long an action may take.
	StuckFor time.Duration

	// GPUWindow is for how long an event of a GPU (an Xid, an error) stays an alert.
	GPUWindow time.Duration

	// NICWindow is the time in which NICFlaps of a port are an alert, and for
	// which ranks that have ended are remembered when their port is down.
	NICWindow time.Duration
	NICFlaps  int
	// NICRetransmissions and NICCongestion are the most a second of a port
	// that nobody need know of, all counters together.
	NICRetransmissions, NICCongestion float64

	// RecorderLossRatio and TraceDropRatio are the shares of records and spans
	// lost that an operator should know of.
	RecorderLossRatio, TraceDropRatio float64
	// ClockError bounds an agent's mapping to host time, NodeClockError a
	// node's clock against the master's.
	ClockError, NodeClockError time.Duration

	Fallback Fallback

	// RunbookBase is the URL that a page's name is added to.
	RunbookBase string
	// GrafanaURL is the URL that /d/... is added to in links to dashboards.
	GrafanaURL string
}

// Fallback configures the alerts that work without a master.
type Fallback struct {
	// HangAfter is the age of an open collective, while its communicator ends
	// none, that is a hang; it should exceed the longest checkpoint.
	HangAfter time.Duration
	For       time.Duration

	// A collective is slow when its mean duration over SlowWindow exceeds
	// SlowRatio times its mean SlowOffset ago, and SlowFloor more.
	SlowWindow, SlowOffset time.Duration
	SlowRatio              float64
	SlowFloor              time.Duration
}

// DefaultConfig suits scrape intervals up to 15 s.
func DefaultConfig() Config {
	return Config{
		VerdictInterval:    time.Second,
		Interval:           5 * time.Second,
		Window:             time.Minute,
		SuspectedFor:       10 * time.Second,
		DownFor:            30 * time.Second,
		Memory:             time.Hour,
		TroubleFor:         time.Minute,
		StuckFor:           5 * time.Minute,
		CertificateSoon:    10 * time.Minute,
		GPUWindow:          15 * time.Minute,
		NICWindow:          15 * time.Minute,
		NICFlaps:           3,
		NICRetransmissions: 10,
		NICCongestion:      1000,
		RecorderLossRatio:  0.001,
		TraceDropRatio:     0.01,
		ClockError:         time.Millisecond,
		NodeClockError:     50 * time.Millisecond,
		Fallback: Fallback{
			HangAfter:  time.Minute,
			For:        15 * time.Second,
			SlowWindow: 5 * time.Minute,
			SlowOffset: 30 * time.Minute,
			SlowRatio:  1.5,
			SlowFloor:  time.Millisecond,
		},
		RunbookBase: names.RunbookBase,
	}
}

// FastConfig suits a stack on one machine that scrapes every 500 ms or faster: the
// same rules, on a scale of seconds.
func FastConfig() Config {
	c := DefaultConfig()
	c.VerdictInterval = 250 * time.Millisecond
	c.Interval = time.Second
	c.Window = 10 * time.Second
	c.SuspectedFor = 5 * time.Second
	c.DownFor = 3 * time.Second
	c.TroubleFor = 10 * time.Second
	c.StuckFor = 30 * time.Second
	c.GPUWindow = 30 * time.Second
	c.NICWindow = 30 * time.Second
	c.Fallback = Fallback{
		HangAfter:  10 * time.Second,
		For:        2 * time.Second,
		SlowWindow: 20 * time.Second,
		SlowOffset: 2 * time.Minute,
		SlowRatio:  2,
		SlowFloor:  5 * time.Millisecond,
	}
	return c
}
