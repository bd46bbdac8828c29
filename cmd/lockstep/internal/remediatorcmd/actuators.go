package remediatorcmd

import (
	"context"
	"fmt"
	"log/slog"
	"path"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/remediation"
	"github.com/lockstep-ccl/lockstep/remediation/elastic"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// Actuators selects what carries actions out. A new one adds its name to the enum, its
// options, and a case to build.
type Actuators struct {
	Actuator   string            `enum:"process,kubernetes,slurm" default:"process" help:"What carries actions out: ${enum}."`
	Supervisor map[string]string `placeholder:"JOB=SOCKET" help:"Control sockets of supervised jobs (lockstep run --control), for --actuator process."`
	Elastic    []string          `placeholder:"PATTERN" help:"Jobs whose launcher starts ranks again by itself when they end (torchrun --max-restarts), by name or shell pattern: the nodes' agents end the attempt, for ranks with LOCKSTEP_FENCE=stop in their environment. Repeatable, for --actuator process."`
	Kubernetes kubernetesOptions `embed:"" prefix:"kubernetes."`
	Slurm      slurmFlags        `embed:"" prefix:"slurm."`
}

// actuator is a remediation.Actuator, and what it needs beside.
type actuator struct {
	remediation.Actuator
	// fencer, when set, is asked before each action; the others ask between their own steps.
	fencer remediation.Fencer
	// lead, when set, calls run while this process is the one that acts, and leads says whether it is.
	lead  func(ctx context.Context, run func(context.Context) error) error
	leads func() bool
	// keep, when set, goes on beside the remediator until ctx ends.
	keep func(ctx context.Context)
	// release, when set, lets go of what it holds at the end.
	release func() error
}

func (a *Actuators) build(log *slog.Logger, reg prometheus.Registerer, fencer remediation.Fencer) (actuator, error) {
	for _, p := range a.Elastic {
		if _, err := path.Match(p, ""); err != nil {
			return actuator{}, fmt.Errorf("remediator: --elastic %q: %w", p, err)
		}
	}
	switch a.Actuator {
	case "process":
		supervisors := &process.Actuator{Socket: func(job string) (string, bool) { s, ok := a.Supervisor[job]; return s, ok }}
		if len(a.Elastic) == 0 {
			return actuator{fencer: fencer, Actuator: supervisors}, nil
		}
		return actuator{fencer: fencer, Actuator: elastic.First{
			supervisors,
			&elastic.Actuator{Fencer: fencer, Knows: func(job string) bool { return matches(a.Elastic, job) }},
		}}, nil
	case "kubernetes":
		return a.Kubernetes.build(log, reg, fencer)
	case "slurm":
		s, err := a.Slurm.actuator(log, fencer)
		if err != nil {
			return actuator{}, fmt.Errorf("remediator: %w", err)
		}
		return actuator{Actuator: s, release: s.Close}, nil
	}
	return actuator{}, fmt.Errorf("--actuator %s: there is no such", a.Actuator)
}

// matches reports whether a job's name is among patterns, which are well-formed.
func matches(patterns []string, job string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { ok, _ := path.Match(p, job); return ok })
}
