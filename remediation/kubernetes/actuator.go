package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/dynamic"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// Options of an Actuator.
type Options struct {
	Client dynamic.Interface
	// Namespaces are those whose jobs it may restart; jobs elsewhere are none of its.
	Namespaces []string
	// Jobs says in which of them a job is, by its name. In the others nothing is the job's, whatever its
	// labels say; a job that is not named here may be in any, and in two of them it is nobody's.
	Jobs map[string]string
	// Namespace is where its own objects lie: the lease of who leads, preflight's Jobs.
	Namespace string
	// Identity names this process among those that would lead.
	Identity string
	// Fencer proves that ranks on a node that does not answer have ended. nil: nobody can.
	Fencer remediation.Fencer
	// UnfencedAfter is for how long a node must have been silent before its pods are deleted
	// by force though nothing proves that they have ended. 0: never.
	UnfencedAfter time.Duration
	// Hold is how long a node that was blamed stays out before preflight may bring it
	// back; twice as long each time that it is blamed again. 0: 24 hours.
	Hold time.Duration
	// MaxOut bounds how many nodes may be out at a time because they were blamed, with no spare in their
	// place. 0: eight.
	MaxOut int
	// ReturnAfter is how long a node that was silent must be heard again before it
	// returns. 0: a minute.
	ReturnAfter time.Duration
	// WhenEmpty is what happens when a pool has no spare.
	WhenEmpty WhenEmpty
	// Preflight is the Job that a node must pass before it returns; nil: an operator uncordons.
	Preflight *Preflight
	Logger    *slog.Logger
	Registry  prometheus.Registerer
	// Poll is how often an action in flight looks at its job, and Keep how often nodes
	// that are out are looked at. 0: a second, and five.
	Poll, Keep time.Duration
	// now is the calendar, by which nodes are held; nil: time.Now. Whether a node is
	// heard is measured by the process's own clock.
	now func() time.Time
}

// Actuator restarts jobs on a Kubernetes cluster. It is safe for concurrent use.
type Actuator struct {
	o       Options
	m       *metrics
	leading atomic.Bool
	// fenceWait bounds one question for proof. Who asks has other nodes to look after, and asks again.
	fenceWait time.Duration
	taking    sync.Mutex // a spare
	counting  sync.Mutex // of nodes that are out, before one more is

	mu    sync.Mutex
	heard map[string]heard // nodes' leases, by our own clock
}

// New checks the options. Nothing is asked of the API server yet.
func New(o Options) (*Actuator, error) {
	switch {
	case o.Client == nil:
		return nil, errors.New("kubernetes: no client")
	case len(o.Namespaces) == 0:
		return nil, errors.New("kubernetes: no namespace whose jobs may be restarted (--kubernetes.namespace)")
	case o.MaxOut < 0:
		return nil, errors.New("kubernetes: how many nodes may be out must not be negative")
	case o.UnfencedAfter < 0 || o.Hold < 0 || o.ReturnAfter < 0:
		return nil, errors.New("kubernetes: durations must not be negative")
	}
	if err := o.WhenEmpty.check(); err != nil {
		return nil, err
	}
	if slices.Contains(o.Namespaces, "") {
		return nil, errors.New("kubernetes: an empty namespace would be all of them: name each")
	}
	for job, ns := range o.Jobs {
		if !slices.Contains(o.Namespaces, ns) {
			return nil, fmt.Errorf("kubernetes: job %s is said to be in namespace %q, which is not among those whose jobs may be restarted: %v", job, ns, o.Namespaces)
		}
	}
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&o.Hold, 24 * time.Hour}, {&o.ReturnAfter, time.Minute}, {&o.Poll, time.Second}, {&o.Keep, 5 * time.Second}} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	o.MaxOut = cmp.Or(o.MaxOut, 8)
	if o.now == nil {
		o.now = time.Now
	}
	if o.Namespace == "" {
		o.Namespace = o.Namespaces[0]
	}
	if o.Identity == "" {
		o.Identity = manager
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	m, err := newMetrics(o.Registry)
	if err != nil {
		return nil, err
	}
	a := &Actuator{o: o, m: m, fenceWait: 10 * time.Second, heard: map[string]heard{}}
	a.leading.Store(true) // until Lead says otherwise
	return a, nil
}

// manager is who made a change, as Kubernetes notes it down.
const manager = "lockstep-remediator"

// Name implements remediation.Actuator.
func (*Actuator) Name() string { return "kubernetes" }

func (a *Actuator) resource(gvr gvr, ns string) dynamic.ResourceInterface {
	if ns == "" {
		return a.o.Client.Resource(gvr)
	}
	return a.o.Client.Resource(gvr).Namespace(ns)
}

// Inventory implements remediation.Actuator: a unit is a node. Of how many it is one, the
// pool says that the job's nodes are of, else the job's own count.
func (a *Actuator) Inventory(ctx context.Context, name string) (remediation.Inventory, error) {
	j, err := a.find(ctx, name)
	if err != nil {
		return remediation.Inventory{}, away(ctx, err)
	}
	nodes := j.nodes()
	units := len(nodes)
	if len(nodes) > 0 {
		pool, err := a.poolOf(ctx, nodes[0])
		if err != nil {
			return remediation.Inventory{}, away(ctx, fmt.Errorf("kubernetes: %w", err))
		}
		units = max(units, len(pool.nodes))
	}
	unit := func(rank int, node string) string {
		p, why := j.culprit(rank, node)
		if p == nil {
			a.o.Logger.Warn("the culprit's node is not known", "job", name, "rank", rank, "node", node, "why", why)
			return ""
		}
		return p.node
	}
	return remediation.Inventory{
		Units:  units,
		Unit:   func(rank int) string { return unit(rank, "") },
		UnitOn: unit,
		Made:   j.made(),
	}, nil
}
