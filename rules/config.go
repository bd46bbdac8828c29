package rules

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/prometheus/common/model"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Config holds what an operator may want otherwise. Start from DefaultConfig. As YAML it is
// the part "rules" of `lockstep rules --config`.
type Config struct {
	// VerdictInterval is how often verdicts become alerts. It adds to the time
	// from fault to action, and its rules are cheap.
	VerdictInterval time.Duration `yaml:"verdict_interval"`
	// Interval is how often all other rules are evaluated.
	Interval time.Duration `yaml:"interval"`
	// Window is the range of rates, at least four scrape intervals.
	Window time.Duration `yaml:"window"`

	// SuspectedFor is how long a fault stays suspected before that is an alert;
	// most are confirmed or gone sooner.
	SuspectedFor time.Duration `yaml:"suspected_for"`
	// DownFor is how long a component is down before that is an alert, Memory
	// for how long it is remembered which component a target was.
	DownFor time.Duration `yaml:"down_for"`
	Memory  time.Duration `yaml:"memory"`
	// TroubleFor is the same for troubles that the pipeline survives.
	TroubleFor time.Duration `yaml:"trouble_for"`
	// CertificateSoon is how long before its end a certificate that was not replaced is an alert.
	CertificateSoon time.Duration `yaml:"certificate_soon"`
	// StuckFor is how long an action may take.
	StuckFor time.Duration `yaml:"stuck_for"`

	// GPUWindow is for how long an event of a GPU (an Xid, an error) stays an alert.
	GPUWindow time.Duration `yaml:"gpu_window"`

	// NICWindow is the time in which NICFlaps of a port are an alert, and for
	// which ranks that have ended are remembered when their port is down.
	NICWindow time.Duration `yaml:"nic_window"`
	NICFlaps  int           `yaml:"nic_flaps"`
	// NICRetransmissions and NICCongestion are the most a second of a port
	// that nobody need know of, all counters together.
	NICRetransmissions float64 `yaml:"nic_retransmissions"`
	NICCongestion      float64 `yaml:"nic_congestion"`

	// FabricUneven is how much fuller than its leaf's mean the fullest link may be planned.
	FabricUneven float64 `yaml:"fabric_uneven"`

	// RecorderLossRatio and TraceDropRatio are the shares of records and spans
	// lost that an operator should know of.
	RecorderLossRatio float64 `yaml:"recorder_loss_ratio"`
	TraceDropRatio    float64 `yaml:"trace_drop_ratio"`
	// ClockError bounds an agent's mapping to host time, NodeClockError a
	// node's clock against the master's.
	ClockError     time.Duration `yaml:"clock_error"`
	NodeClockError time.Duration `yaml:"node_clock_error"`

	Fallback Fallback `yaml:"fallback"`

	// Labels are added to every alert, such as a team's name for routing.
	Labels map[string]string `yaml:"labels,omitempty"`
	// NodePattern takes, by its first group, a node's name out of the label instance of alerts
	// about a node's hardware, as their label node; that is how a verdict about the node,
	// which has one, can mute them. "" leaves them without.
	NodePattern string `yaml:"node_pattern"`

	// RunbookBase is the URL that a page's name, and RunbookSuffix, are added to.
	RunbookBase   string `yaml:"runbook_base"`
	RunbookSuffix string `yaml:"runbook_suffix"`
	// GrafanaURL is the URL that /d/... is added to in links to dashboards.
	GrafanaURL string `yaml:"grafana_url"`
}

// Fallback configures the alerts that work without a master.
type Fallback struct {
	// HangAfter is the age of an open collective, while its communicator ends
	// none, that is a hang; it should exceed the longest checkpoint.
	HangAfter time.Duration `yaml:"hang_after"`
	For       time.Duration `yaml:"for"`

	// A collective is slow when its mean duration over SlowWindow exceeds
	// SlowRatio times its mean SlowOffset ago, and SlowFloor more.
	SlowWindow time.Duration `yaml:"slow_window"`
	SlowOffset time.Duration `yaml:"slow_offset"`
	SlowRatio  float64       `yaml:"slow_ratio"`
	SlowFloor  time.Duration `yaml:"slow_floor"`
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
		FabricUneven:       1.25,
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
		NodePattern:   `([^:]+)(?::\d+)?`,
		RunbookBase:   names.RunbookBase,
		RunbookSuffix: ".md",
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

// Validate says which value makes no sense.
func (c *Config) Validate() error {
	for name, d := range map[string]time.Duration{
		"verdict_interval": c.VerdictInterval, "interval": c.Interval, "window": c.Window, "memory": c.Memory, "gpu_window": c.GPUWindow, "nic_window": c.NICWindow,
		"certificate_soon": c.CertificateSoon, "stuck_for": c.StuckFor, "clock_error": c.ClockError, "node_clock_error": c.NodeClockError,
		"fallback.hang_after": c.Fallback.HangAfter, "fallback.slow_window": c.Fallback.SlowWindow, "fallback.slow_offset": c.Fallback.SlowOffset,
	} {
		if d < time.Millisecond {
			return fmt.Errorf("%s: %v: want at least 1ms", name, d)
		}
	}
	for name, d := range map[string]time.Duration{"suspected_for": c.SuspectedFor, "down_for": c.DownFor, "trouble_for": c.TroubleFor, "fallback.for": c.Fallback.For, "fallback.slow_floor": c.Fallback.SlowFloor} {
		if d < 0 {
			return fmt.Errorf("%s: %v: want 0 or more", name, d)
		}
	}
	for name, x := range map[string]float64{"recorder_loss_ratio": c.RecorderLossRatio, "trace_drop_ratio": c.TraceDropRatio} {
		if !(x >= 0 && x < 1) {
			return fmt.Errorf("%s: %v: want a ratio, 0 to 1", name, x)
		}
	}
	switch {
	case c.NICFlaps < 1:
		return fmt.Errorf("nic_flaps: %d: want 1 or more", c.NICFlaps)
	case !(c.NICRetransmissions >= 0 && c.NICCongestion >= 0):
		return errors.New("nic_retransmissions, nic_congestion: want 0 or more")
	case !(c.FabricUneven > 1):
		return errors.New("fabric_uneven: want more than 1")
	case !(c.Fallback.SlowRatio > 1):
		return fmt.Errorf("fallback.slow_ratio: %v: want more than 1", c.Fallback.SlowRatio)
	}
	if re, err := regexp.Compile(c.NodePattern); err != nil || c.NodePattern != "" && re.NumSubexp() < 1 {
		return fmt.Errorf("node_pattern: %q: want a regular expression with a group", c.NodePattern)
	}
	for name, value := range c.Labels {
		if !model.LegacyValidation.IsValidLabelName(name) || slices.Contains(names.IncidentInfo.Labels, name) || name == "severity" || name == "alertname" || name == "instance" {
			return fmt.Errorf("labels: %s: %s: no label of that name can be added", name, value)
		}
	}
	return nil
}
