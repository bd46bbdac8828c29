package remediatorcmd

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lockstep-ccl/lockstep/remediation"
	"github.com/lockstep-ccl/lockstep/remediation/kubernetes"
)

type kubernetesOptions struct {
	Kubeconfig    string            `type:"existingfile" placeholder:"FILE" help:"How to reach the API server (default: the pod's service account)."`
	Namespace     []string          `placeholder:"NAME" help:"Namespace whose jobs may be restarted. Repeatable (default: the one that this runs in)."`
	Jobs          map[string]string `name:"job" mapsep:"," placeholder:"JOB=NAMESPACE" help:"In which of them a job is, so that pods that other tenants label with its name do not make it ambiguous. Repeatable."`
	UnfencedAfter time.Duration     `placeholder:"DURATION" help:"Delete pods by force on a node that has been silent for so long, though nothing proves that their processes have ended. Without it they wait for proof."`
	Hold          time.Duration     `default:"24h" help:"How long a node that was blamed stays out at least, before --kubernetes.preflight may bring it back; doubled each time it is blamed again."`
	MaxOut        int               `default:"8" placeholder:"N" help:"How many nodes may be out at a time because they were blamed, with no spare of their pool in their place: one more stays in, and its job is restarted in place."`
	ReturnAfter   time.Duration     `default:"1m" help:"How long a node that was silent must be heard before it returns."`
	WhenPoolEmpty string            `enum:"in-place,wait" default:"in-place" help:"What to do when the pool of the node to take out has no spare: ${enum}."`
	Preflight     string            `type:"existingfile" placeholder:"FILE" help:"Manifest of the Job that a node must pass before it returns. Without it an operator uncordons."`
	Lead          bool              `default:"true" negatable:"" help:"Act only while holding the lease lockstep-remediator, so that several may run."`
}

const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

func (o *kubernetesOptions) build(log *slog.Logger, reg prometheus.Registerer, fencer remediation.Fencer) (actuator, error) {
	config, own, err := o.reach()
	if err != nil {
		return actuator{}, fmt.Errorf("remediator: %w", err)
	}
	config.UserAgent, config.QPS, config.Burst, config.Timeout = "lockstep-remediator", 20, 40, 10*time.Second
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return actuator{}, fmt.Errorf("remediator: %w", err)
	}
	if len(o.Namespace) == 0 {
		o.Namespace = []string{own}
	}
	host, err := os.Hostname()
	if err != nil {
		return actuator{}, fmt.Errorf("remediator: %w", err)
	}
	k := kubernetes.Options{
		Client: client, Namespaces: o.Namespace, Jobs: o.Jobs, Namespace: own, Identity: host + "_" + rand.Text()[:8],
		UnfencedAfter: o.UnfencedAfter, Hold: o.Hold, MaxOut: o.MaxOut, ReturnAfter: o.ReturnAfter, WhenEmpty: kubernetes.WhenEmpty(o.WhenPoolEmpty),
		Logger: log, Registry: reg, Fencer: fencer,
	}
	if o.Preflight != "" {
		text, err := os.ReadFile(o.Preflight)
		if err == nil {
			k.Preflight, err = kubernetes.ParsePreflight(text)
		}
		if err != nil {
			return actuator{}, fmt.Errorf("remediator: %s: %w", o.Preflight, err)
		}
	}
	a, err := kubernetes.New(k)
	if err != nil {
		return actuator{}, fmt.Errorf("remediator: %w", err)
	}
	act := actuator{Actuator: a, keep: a.Keep}
	if o.Lead {
		act.lead, act.leads = a.Lead, a.Leads
	}
	return act, nil
}

// reach says how the API server is reached, and in which namespace this runs.
func (o *kubernetesOptions) reach() (*rest.Config, string, error) {
	if o.Kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, "", errors.New("this is no pod: --kubernetes.kubeconfig is missing")
		}
		if err != nil {
			return nil, "", err
		}
		ns, err := os.ReadFile(namespaceFile)
		return config, strings.TrimSpace(string(ns)), err
	}
	c := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: o.Kubeconfig}, nil)
	config, err := c.ClientConfig()
	if err != nil {
		return nil, "", err
	}
	ns, _, err := c.Namespace()
	return config, ns, err
}
