package demo

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation/kubernetes"
)

// kubernetesSite is a cluster with JobSet, used through kubectl: a namespace of its own has the
// ranks, one a node, and an agent on each of these nodes.
type kubernetesSite struct {
	job     string // its name, and the namespace's
	dir     string // on a file system that this machine and the nodes share
	shape   shape
	spares  int
	image   string
	address string
	wait    time.Duration
	run     func(ctx context.Context, input string, args ...string) (string, error) // kubectl
	say     func(format string, args ...any)

	server string
	hosts  []kubeNode // that the job may use
	made   bool
}

// kubeNode is a node that takes pods.
type kubeNode struct{ name, address string }

// kubectl runs it with input.
func kubectl(ctx context.Context, input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "kubectl", args...)
	cmd.Stdin, cmd.WaitDelay = strings.NewReader(input), time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// check asks who is there, and picks the nodes.
func (k *kubernetesSite) check(ctx context.Context) error {
	if _, err := exec.LookPath("kubectl"); err != nil {
		return fmt.Errorf("--on kubernetes: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := static(self); err != nil {
		return err
	}
	if _, err := k.run(ctx, "", "get", "crd", "jobsets.jobset.x-k8s.io", "-o", "name", "--request-timeout=20s"); err != nil {
		return fmt.Errorf("--on kubernetes: a cluster with JobSet is needed: %w", err)
	}
	if k.server, err = k.run(ctx, "", "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"); err != nil {
		return err
	}
	out, err := k.run(ctx, "", "get", "nodes", "-o", "json", "--request-timeout=20s")
	if err != nil {
		return err
	}
	if k.hosts, err = kubeNodes(out); err != nil {
		return err
	}
	if want := k.shape.nodes + k.spares; len(k.hosts) < want {
		return fmt.Errorf("--on kubernetes: %d nodes are ready and take any pod, %d are needed: choose --nodes and --spares", len(k.hosts), want)
	}
	k.hosts = k.hosts[:k.shape.nodes+k.spares]
	return nil
}

// static: pods run this program in an image that need not have a loader and its libraries.
func static(file string) error {
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("--on kubernetes: %w", err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return fmt.Errorf("--on kubernetes: %s wants shared libraries, and is to run in pods: use a release's, or build it with CGO_ENABLED=0", file)
	}
	return nil
}

// kubeNodes are those of kubectl's list that are ready, in use, and take pods without tolerations.
func kubeNodes(list string) (nodes []kubeNode, err error) {
	var l struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct {
				Unschedulable bool
				Taints        []struct{ Effect string }
			}
			Status struct {
				Conditions []struct{ Type, Status string }
				Addresses  []struct{ Type, Address string }
			}
		}
	}
	if err := json.Unmarshal([]byte(list), &l); err != nil {
		return nil, fmt.Errorf("--on kubernetes: the nodes: %w", err)
	}
	for _, n := range l.Items {
		ready, kept := false, n.Spec.Unschedulable
		for _, c := range n.Status.Conditions {
			ready = ready || c.Type == "Ready" && c.Status == "True"
		}
		for _, t := range n.Spec.Taints {
			kept = kept || t.Effect != "PreferNoSchedule"
		}
		for _, a := range n.Status.Addresses {
			if a.Type == "InternalIP" && ready && !kept {
				nodes = append(nodes, kubeNode{n.Metadata.Name, a.Address})
				break
			}
		}
	}
	return nodes, nil
}

func (k *kubernetesSite) names() (names []string) {
	for _, h := range k.hosts {
		names = append(names, h.name)
	}
	return names
}

func (k *kubernetesSite) where() string {
	return fmt.Sprintf("%d nodes of Kubernetes cluster %s, and %d spare", k.shape.nodes, k.server, k.spares)
}

func (k *kubernetesSite) plan() []string {
	return []string{
		fmt.Sprintf("make a namespace, %s, in which pods may use their node's network and files (pod-security.kubernetes.io/enforce: privileged)", k.job),
		fmt.Sprintf("run in it a JobSet of %d ranks, one a node, and a DaemonSet of agents (hostPID) on these nodes and no other: %s", k.shape.world(), strings.Join(k.names(), ", ")),
		"break ranks of this job, and let the remediator, with the rights of your kubeconfig, restart it; a node that it blames or does not hear it taints and cordons, and that is undone in the end",
		"listen on this machine for the agents, with certificates of this run's own; all other parts run here, on loopback",
		fmt.Sprintf("keep logs, checkpoints and this program in %s, which the nodes must see by this name, and /dev/shm/%s on each node; containers are of image %s", k.dir, k.job, k.image),
		"remove all of it in the end (kubectl delete namespace)",
	}
}

func (k *kubernetesSite) kubeconfig() string { return filepath.Join(k.dir, "kubeconfig") }

func (k *kubernetesSite) traits() traits { return traits{spares: true} }

func (k *kubernetesSite) actuator() []string {
	return []string{"--actuator", "kubernetes", "--kubernetes.kubeconfig", k.kubeconfig(), "--kubernetes.namespace", k.job}
}

// prepare makes the namespace, and what the remediator reaches it by: this machine's access.
func (k *kubernetesSite) prepare(ctx context.Context) (string, error) {
	config, err := k.run(ctx, "", "config", "view", "--minify", "--flatten", "--raw")
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(k.kubeconfig(), []byte(config+"\n"), 0o600); err != nil {
		return "", err
	}
	if _, err := k.run(ctx, "", "--kubeconfig", k.kubeconfig(), "config", "set-context", "--current", "--namespace", k.job); err != nil {
		return "", err
	}
	k.made = true
	if err := k.apply(ctx, k.namespace()); err != nil {
		return "", err
	}
	if k.address != "" {
		return k.address, nil
	}
	return towards(ctx, k.hosts[0].address)
}

// submit makes namespace, secrets, agents and, when these are there, the job.
func (k *kubernetesSite) submit(ctx context.Context, c *cluster, certs certs) error {
	if err := copyFile(filepath.Join(k.dir, "lockstep"), c.self, 0o700); err != nil {
		return err
	}
	if _, err := secret(filepath.Join(k.dir, "secret")); err != nil {
		return err
	}
	for _, h := range k.hosts {
		if err := certs.agentCert(h.name); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, k.wait)
	defer cancel()
	if err := k.apply(ctx, k.agents(c)); err != nil {
		return err
	}
	if _, err := k.run(ctx, "", "-n", k.job, "rollout", "status", "daemonset/agent", "--timeout", k.wait.String()); err != nil {
		return fmt.Errorf("%w\n%s", err, k.pods(ctx))
	}
	if err := k.apply(ctx, k.ranks(c)); err != nil {
		return err
	}
	for {
		if nodes, err := k.nodes(ctx); err == nil && len(nodes) == k.shape.nodes {
			return nil
		}
		if !sleep(ctx, 300*time.Millisecond) {
			return fmt.Errorf("the ranks' pods do not run after %v: wait longer with --wait\n%s", k.wait, k.pods(context.WithoutCancel(ctx)))
		}
	}
}

// pods is what there is, for errors.
func (k *kubernetesSite) pods(ctx context.Context) string {
	out, err := k.run(ctx, "", "-n", k.job, "get", "pods", "-o", "wide")
	if err != nil {
		return err.Error()
	}
	return out
}

func (k *kubernetesSite) apply(ctx context.Context, objects ...object) error {
	b, err := json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": objects})
	if err != nil {
		return err
	}
	_, err = k.run(ctx, string(b), "apply", "-f", "-")
	return err
}

// nodes have a running rank of the youngest attempt.
func (k *kubernetesSite) nodes(ctx context.Context) ([]string, error) {
	out, err := k.run(ctx, "", "-n", k.job, "get", "pods", "-l", "lockstep.dev/job="+k.job, "-o", "json")
	if err != nil {
		return nil, err
	}
	return rankNodes(out)
}

func rankNodes(list string) ([]string, error) {
	var l struct {
		Items []struct {
			Metadata struct {
				Labels            map[string]string
				DeletionTimestamp *string
			}
			Spec   struct{ NodeName string }
			Status struct{ Phase string }
		}
	}
	if err := json.Unmarshal([]byte(list), &l); err != nil {
		return nil, fmt.Errorf("the ranks' pods: %w", err)
	}
	newest, nodes := -1, []string(nil)
	for _, p := range l.Items {
		n := -1
		if _, err := fmt.Sscan(p.Metadata.Labels[restartAttempt], &n); err != nil || n < newest {
			continue
		}
		if n > newest {
			newest, nodes = n, nil
		}
		if p.Status.Phase == "Running" && p.Metadata.DeletionTimestamp == nil {
			nodes = append(nodes, p.Spec.NodeName)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes), nil
}

// canLose: a JobSet has no first node.
func (k *kubernetesSite) canLose(context.Context, string) error { return nil }

// exec runs lockstep in the agent's pod, which sees all processes of its node.
func (k *kubernetesSite) exec(ctx context.Context, node string, args ...string) error {
	pod, err := k.run(ctx, "", "-n", k.job, "get", "pods", "-l", "app=agent", "--field-selector", "spec.nodeName="+node, "-o", "jsonpath={.items[0].metadata.name}")
	if err != nil {
		return err
	}
	_, err = k.run(ctx, "", append([]string{"-n", k.job, "exec", pod, "--", filepath.Join(k.dir, "lockstep")}, args...)...)
	return err
}

// remove brings nodes back that were taken out, and deletes the namespace.
func (k *kubernetesSite) remove() {
	if !k.made {
		return
	}
	k.made = false
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	err := errors.Join(k.bringBack(ctx), k.clean(ctx))
	// Pods of a node that is dead never end by themselves.
	if _, e := k.run(ctx, "", "-n", k.job, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false"); e != nil {
		err = errors.Join(err, e)
	}
	if _, e := k.run(ctx, "", "delete", "namespace", k.job, "--timeout=90s"); e != nil {
		err = errors.Join(err, e)
	}
	if err != nil {
		k.say("not all is removed from the cluster (kubectl delete namespace %s): %v", k.job, err)
	}
}

// clean ends the job, then removes what it has left on its nodes.
func (k *kubernetesSite) clean(ctx context.Context) error {
	if _, err := k.run(ctx, "", "-n", k.job, "delete", "jobset", k.job, "--ignore-not-found", "--cascade=foreground", "--timeout=20s"); err != nil && ctx.Err() == nil {
		return nil // a dead node holds it up
	}
	order, err := json.Marshal(injection{Clean: true, Dir: nodeDir(k.job, "")})
	if err != nil {
		return err
	}
	for _, h := range k.hosts {
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		_ = k.exec(short, h.name, "fault", string(order)) // a node that is gone has lost its memory, too
		cancel()
	}
	return nil
}

// bringBack takes the remediator's marks off nodes of the job, once it has ended: none of them had
// any when they were picked.
func (k *kubernetesSite) bringBack(ctx context.Context) error {
	list, err := k.run(ctx, "", "get", "nodes", "-l", kubernetes.Suspect, "-o", "name")
	for n := range strings.FieldsSeq(list) {
		if n = strings.TrimPrefix(n, "node/"); !slices.Contains(k.names(), n) {
			continue
		}
		for _, args := range [][]string{
			{"uncordon", n}, {"taint", "nodes", n, kubernetes.Suspect + "-"}, {"annotate", "node", n, kubernetes.Suspect + "-"}, {"label", "node", n, kubernetes.Suspect + "-"},
			{"patch", "node", n, "--subresource=status", "--type=strategic", "-p", `{"status":{"conditions":[{"type":"` + kubernetes.ConditionSuspect + `","$patch":"delete"}]}}`},
		} {
			if _, e := k.run(ctx, "", args...); e != nil {
				err = errors.Join(err, e)
			}
		}
	}
	return err
}
