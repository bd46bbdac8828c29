package remediation

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// ActionKind is what may be done about an incident.
type ActionKind string

const (
	// ActionNone journals the alert and does nothing.
	ActionNone ActionKind = "none"
	// ActionRestart restarts the job from its last checkpoint, in place.
	ActionRestart ActionKind = "restart"
	// ActionExclude restarts it without the slot of the rank to blame, on a spare.
	ActionExclude ActionKind = "restart_excluding"
)

// Config is the remediator's configuration file (YAML, unknown fields are errors).
type Config struct {
	// DryRun decides and journals but never calls an actuator. It is the
	// default: false must be written down.
	DryRun *bool `yaml:"dry_run"`
	// MaxAge: an alert that started longer ago is stale and changes nothing; by
	// then a person is at it. One that starts so far in the future is, too.
	MaxAge time.Duration `yaml:"max_age"`
	// ActionTimeout bounds one call of an actuator.
	ActionTimeout time.Duration `yaml:"action_timeout"`
	// FenceTimeout bounds the wait for proof that nothing of the old attempt goes on.
	FenceTimeout time.Duration `yaml:"fence_timeout"`
	// Policies are tried in order; the first match decides, no match means none.
	Policies []Policy      `yaml:"policies"`
	Breaker  BreakerConfig `yaml:"breaker"`
}

// Policy maps what happened to what is done. Empty fields match everything.
type Policy struct {
	Name   string     `yaml:"name"`
	Job    string     `yaml:"job,omitempty"`    // shell pattern (path.Match)
	Class  string     `yaml:"class,omitempty"`  // a verdict class
	Reason string     `yaml:"reason,omitempty"` // shell pattern over the verdict's reason
	Action ActionKind `yaml:"action"`
	DryRun bool       `yaml:"dry_run,omitempty"`
	// ActWithoutProof acts though nobody can prove that nothing of the old attempt goes on: false.
	// What a supervisor does in place needs no proof: it has reaped the old attempt itself.
	ActWithoutProof *bool `yaml:"act_without_proof,omitempty"`
}

// BreakerConfig bounds what may be done unattended.
type BreakerConfig struct {
	// Window is the time over which Job, Total and Units are counted.
	Window time.Duration `yaml:"window"`
	// Job is how many actions one job may see in Window, Total how many all jobs may.
	Job   int `yaml:"job"`
	Total int `yaml:"total"`
	// UnitShare (0–1] and Units bound how many distinct units (slots, nodes) may be
	// taken out in Window: a share of the job's own, which never rounds below one, and
	// a number for all jobs.
	UnitShare float64 `yaml:"unit_share"`
	Units     int     `yaml:"units"`
}

// DefaultConfig restarts on confirmed hangs, takes a rank out that is confirmed
// to be slow by itself, leaves slow links to people, and does none of it for
// real until dry_run is false.
func DefaultConfig() Config {
	dry := true
	return Config{
		DryRun:        &dry,
		MaxAge:        10 * time.Minute,
		ActionTimeout: 2 * time.Minute,
		FenceTimeout:  time.Minute,
		Policies: []Policy{
			{Name: "hang-communication", Class: names.ClassCommunicationHang, Action: ActionRestart},
			{Name: "hang-noncommunication", Class: names.ClassNoncommunicationHang, Action: ActionRestart},
			{Name: "slow-rank", Class: names.ClassNoncommunicationSlow, Action: ActionExclude},
			{Name: "slow-link", Class: names.ClassCommunicationSlow, Action: ActionNone},
		},
		Breaker: BreakerConfig{Window: time.Hour, Job: 5, Total: 20, UnitShare: 0.1, Units: 8},
	}
}

// LoadConfig reads a YAML file over the defaults. A list of policies replaces
// the default list as a whole.
func LoadConfig(file string) (Config, error) {
	f, err := os.Open(file)
	if err != nil {
		return Config{}, fmt.Errorf("remediator config: %w", err)
	}
	defer f.Close()
	cfg, err := ParseConfig(f)
	if err != nil {
		return Config{}, fmt.Errorf("remediator config %s: %w", file, err)
	}
	return cfg, nil
}

// ParseConfig is LoadConfig on a reader.
func ParseConfig(r io.Reader) (Config, error) {
	cfg := DefaultConfig()
	d := yaml.NewDecoder(io.LimitReader(r, 1<<20))
	d.KnownFields(true)
	if err := d.Decode(&cfg); err != nil && !errors.Is(err, io.EOF) {
		return Config{}, err
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return Config{}, errors.New("more than one document, of which only the first would count")
	}
	return cfg, cfg.Validate()
}

// Validate names the first field that cannot be used, and what it may be.
func (c *Config) Validate() error {
	if c.DryRun == nil {
		return errors.New("dry_run: must be true or false")
	}
	if c.MaxAge <= 0 {
		return fmt.Errorf("max_age: %v must be above 0", c.MaxAge)
	}
	if c.ActionTimeout <= 0 {
		return fmt.Errorf("action_timeout: %v must be above 0", c.ActionTimeout)
	}
	if c.FenceTimeout <= 0 {
		return fmt.Errorf("fence_timeout: %v must be above 0", c.FenceTimeout)
	}
	for i, p := range c.Policies {
		at := fmt.Sprintf("policies[%d] (%s)", i, p.Name)
		if p.Name == "" {
			return fmt.Errorf("policies[%d]: name is missing", i)
		}
		switch p.Action {
		case ActionNone, ActionRestart, ActionExclude:
		default:
			return fmt.Errorf("%s: action: %q is not one of none, restart, restart_excluding", at, p.Action)
		}
		if p.Class != "" && !slices.Contains(names.Classes, p.Class) {
			return fmt.Errorf("%s: class: %q is not one of %v", at, p.Class, names.Classes)
		}
		for _, pat := range []string{p.Job, p.Reason} {
			if _, err := path.Match(pat, ""); err != nil {
				return fmt.Errorf("%s: pattern %q: %w", at, pat, err)
			}
		}
	}
	b := c.Breaker
	switch {
	case b.Window <= 0:
		return fmt.Errorf("breaker.window: %v must be above 0", b.Window)
	case b.Job < 1 || b.Total < 1 || b.Units < 0:
		return errors.New("breaker: job and total must be at least 1, units at least 0")
	case b.UnitShare < 0 || b.UnitShare > 1:
		return fmt.Errorf("breaker.unit_share: %v must be between 0 and 1", b.UnitShare)
	}
	return nil
}

// decide returns the policy for an alert. Only a confirmed verdict may lead to an action.
func (c *Config) decide(a *Alert) Policy {
	if a.Level != names.LevelConfirmed {
		return Policy{Name: "suspected", Action: ActionNone}
	}
	for _, p := range c.Policies {
		if match(p.Job, a.Job) && match(p.Reason, a.Reason) && (p.Class == "" || p.Class == a.Class) {
			if p.Action == ActionExclude && a.Rank < 0 {
				p.Action = ActionRestart // nobody to exclude
			}
			p.DryRun = p.DryRun || *c.DryRun
			return p
		}
	}
	return Policy{Name: "no-match", Action: ActionNone}
}

// current reports whether an alert is not stale at now.
func (c *Config) current(now time.Time, a *Alert) bool { return now.Sub(a.began()).Abs() <= c.MaxAge }

// memory is how long what was done still bears on what may be done.
func (c *Config) memory() time.Duration { return max(c.MaxAge, c.Breaker.Window) }

func match(pattern, s string) bool {
	if pattern == "" {
		return true
	}
	ok, _ := path.Match(pattern, s)
	return ok
}
