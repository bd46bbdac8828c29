package remediatorcmd

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/remediation"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// Actuators selects what carries actions out. A new one adds its name to the enum, its
// options, and a case to build.
type Actuators struct {
	Actuator   string            `enum:"process,kubernetes,slurm" default:"process" help:"What carries actions out: ${enum}."`
	Supervisor map[string]string `placeholder:"JOB=SOCKET" help:"Control sockets of supervised jobs (lockstep run --control), for --actuator process."`
	Kubernetes kubernetesOptions `embed:"" prefix:"kubernetes."`
	Slurm      slurmFlags        `embed:"" prefix:"slurm."`
}

// actuator is a remediation.Actuator, and what it needs beside.
type actuator struct {
	remediation.Actuator
	// lead, when set, calls run while this process is the one that acts, and leads says whether it is.
	lead  func(ctx context.Context, run func(context.Context) error) error
	leads func() bool
	// keep, when set, goes on beside the remediator until ctx ends.
	keep func(ctx context.Context)
	// release, when set, lets go of what it holds at the end.
	release func() error
}

func (a *Actuators) build(log *slog.Logger, reg prometheus.Registerer) (actuator, error) {
	switch a.Actuator {
	case "process":
		return actuator{Actuator: &process.Actuator{Socket: func(job string) (string, bool) { s, ok := a.Supervisor[job]; return s, ok }}}, nil
	case "kubernetes":
		return a.Kubernetes.build(log, reg)
	case "slurm":
		s, err := a.Slurm.actuator(log)
		if err != nil {
			return actuator{}, fmt.Errorf("remediator: %w", err)
		}
		return actuator{Actuator: s, release: s.Close}, nil
	}
	return actuator{}, fmt.Errorf("--actuator %s: there is no such", a.Actuator)
}
