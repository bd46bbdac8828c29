package kubelab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/rules"
)

// TestChart is `make test-chart-kubernetes`: both charts on six real kubelets, real ranks on four of
// a pool of five, a real Prometheus and Alertmanager; faults from outside, and what comes of each:
// verdict, alert, action, running again. It ends with the charts uninstalled beside a job that goes on.
//
// n1 has the master and the remediator. There are no DNS and no services: hosts' network.
func TestChart(t *testing.T) {
	c := install(t, 5*time.Second)
	runs, only := number("RUNS", 1), strings.Fields(os.Getenv("FAULTS"))
	var table []string
	for _, f := range faults {
		if len(only) > 0 && !slices.Contains(only, f.name) {
			continue
		}
		var all []outcome
		for run := range runs {
			o := c.play(f, run%4, nil)
			if len(o.wrong) > 0 {
				t.Errorf("%s: %v\n%s\nthe master's state: %s", f.name, o, c.state(), c.keep(run+1))
			}
			all = append(all, o)
		}
		table = append(table, summary(f.name, all))
	}
	t.Logf("seconds from the fault on, median and worst:\n%-18s %4s %5s %12s %12s %12s %12s %10s\n%s", "fault", "runs", "right", "verdict", "alert", "action", "running", "old ended", strings.Join(table, "\n"))
	c.uninstall()
	c.sameLosses()
}

// TestChartKills is the same with KILLS faults at random, in the middle of each of which one part is
// killed (SIGKILL) at random: remediator, master, an agent, the API server. Nothing is done twice,
// nothing lost, and no node taken out with which nothing is wrong.
func TestChartKills(t *testing.T) {
	kills := number("KILLS", 4)
	c := install(t, 20*time.Second) // a master that is killed twice is kept away for ten seconds by its kubelet
	seed := uint64(number("SEED", int(time.Now().Unix())))
	t.Logf("SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 17))
	parts := []string{"remediator", "master", "agent", "apiserver"}
	var times []time.Duration
	for n := range kills {
		f := faults[random.IntN(len(faults))]
		part, after, away := parts[n%len(parts)], time.Duration(random.Int64N(int64(20*time.Second))), time.Duration(random.Int64N(int64(8*time.Second)))
		if f.unplugged && part == "agent" { // it may be the one that stands still
			part = "remediator"
		}
		agent := fmt.Sprintf("n%d", 1+random.IntN(6))
		o := c.play(f, random.IntN(world), func() {
			time.Sleep(after)
			c.kill(part, agent, away)
		})
		t.Logf("%d: %s killed after %.1f s beside %s", n+1, part, after.Seconds(), f.name)
		if len(o.wrong) > 0 {
			t.Errorf("%d: %s, %s killed after %.1f s: %v\n%s\nthe master's state: %s", n+1, f.name, part, after.Seconds(), o, c.state(), c.keep(n+1))
		}
		times = append(times, o.running)
	}
	slices.Sort(times)
	t.Logf("from fault to running again: median %.1f, worst %.1f s of %d", times[len(times)/2].Seconds(), times[len(times)-1].Seconds(), len(times))
	c.uninstall()
	c.sameLosses()
}

func number(name string, or int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	return or
}

// kill ends a part, which comes back: by its kubelet, or after a while by the lab.
func (c *chart) kill(part, node string, away time.Duration) {
	if part == "apiserver" {
		_, _ = Try(filepath.Join(c.dir, "apiserver"), "kill")
		time.Sleep(away)
		_, _ = Try(filepath.Join(c.dir, "apiserver"), "start")
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			if _, err := Try("kubectl", "get", "--raw", "/readyz"); err == nil {
				return
			}
		}
		return
	}
	for _, p := range c.processes(part) {
		if part != "agent" || p.node == node {
			_ = syscall.Kill(p.pid, syscall.SIGKILL) // it may just be gone with its node
		}
	}
}

// fault is broken from outside: by signals, quotas, switches.
type fault struct {
	name   string
	inject func(c *chart, p rank)
	// heal brings the node back, and waits for nothing.
	heal func(c *chart, node string)
	// class and reason of the verdict; no class where what happens is no fault of the job's.
	class, reason string
	moves         bool // the rank is elsewhere afterwards
	// unplugged nodes cannot end their ranks: these are dead, or stand still until they are back.
	unplugged bool
}

var faults = []fault{
	{
		name: "rank_killed", class: "noncommunication_hang", reason: "process_gone",
		inject: func(c *chart, p rank) { c.signal(p, syscall.SIGKILL) },
	},
	{
		name: "rank_stopped", class: "noncommunication_hang", reason: "process_stopped",
		inject: func(c *chart, p rank) { c.signal(p, syscall.SIGSTOP) },
	},
	{
		name: "node_slow", class: "noncommunication_slow", moves: true,
		inject: func(c *chart, p rank) { c.starve(p) },
		heal:   func(c *chart, node string) { c.Kubectl("uncordon", node) },
	},
	{
		name: "power_loss", class: "noncommunication_hang", reason: names.ReasonNodeLost, moves: true,
		inject: func(c *chart, p rank) { c.Node("kill", p.node) },
		heal:   func(c *chart, node string) { c.Node("start", node) },
	},
	{
		name: "node_cut", class: "noncommunication_hang", reason: names.ReasonNodeLost, moves: true,
		inject: func(c *chart, p rank) { c.Node("cut", p.node) },
		heal:   func(c *chart, node string) { c.Node("heal", node) },
	},
	{
		name: "node_frozen", class: "noncommunication_hang", reason: names.ReasonNodeLost, moves: true, unplugged: true,
		inject: func(c *chart, p rank) { c.Node("freeze", p.node) },
		heal:   func(c *chart, node string) { c.Node("thaw", node) },
	},
	{ // its ranks run on, until Kubernetes takes the node for dead
		name: "kubelet_dead", moves: true,
		inject: func(c *chart, p rank) { c.Node("kubelet", p.node) },
		heal: func(c *chart, node string) {
			c.Node("kill", node)
			c.Node("start", node)
		},
	},
}

// outcome is one run of a fault: times since it, 0 for what was not seen.
type outcome struct {
	node                            string
	verdict, alert, action, running time.Duration
	ended                           time.Duration // when the last process of the old attempt had ended
	said                            string        // the verdict
	wrong                           []string
}

func (o outcome) String() string {
	s := fmt.Sprintf("%s: verdict %.1f (%s), alert %.1f, action %.1f, running %.1f, old attempt ended %.1f s", o.node, o.verdict.Seconds(), o.said, o.alert.Seconds(), o.action.Seconds(), o.running.Seconds(), o.ended.Seconds())
	if len(o.wrong) > 0 {
		s += "; WRONG: " + strings.Join(o.wrong, "; ")
	}
	return s
}

func summary(name string, all []outcome) string {
	right := 0
	for _, o := range all {
		if len(o.wrong) == 0 {
			right++
		}
	}
	col := func(of func(outcome) time.Duration) string {
		var l []time.Duration
		for _, o := range all {
			if d := of(o); d > 0 {
				l = append(l, d)
			}
		}
		if len(l) == 0 {
			return "-"
		}
		slices.Sort(l)
		return fmt.Sprintf("%.1f, %.1f", l[len(l)/2].Seconds(), l[len(l)-1].Seconds())
	}
	return fmt.Sprintf("%-18s %4d %5d %12s %12s %12s %12s %10s", name, len(all), right,
		col(func(o outcome) time.Duration { return o.verdict }), col(func(o outcome) time.Duration { return o.alert }),
		col(func(o outcome) time.Duration { return o.action }), col(func(o outcome) time.Duration { return o.running }), col(func(o outcome) time.Duration { return o.ended }))
}

const (
	world  = 4
	settle = 10 * time.Second // of running undisturbed before a fault: slowness needs some history
	within = 3 * time.Minute
)

// chart is what is installed.
type chart struct {
	*Lab
	t                     *testing.T
	helm, lockstep, image string
	stack                 *local.Stack
	mu                    sync.Mutex
	restarts              int // of the JobSet
	restarted             time.Time
	client                http.Client
	losses                string
	lease                 time.Duration // for which a rank lives without a word from its master
}

func install(t *testing.T, lease time.Duration) *chart {
	if os.Getenv("LOCKSTEP_TEST_HELM") == "" {
		t.Skip("make test-chart-kubernetes runs this: it needs root, helm, images, and a cluster that takes minutes to build once")
	}
	c := &chart{t: t, helm: os.Getenv("LOCKSTEP_TEST_HELM"), lockstep: os.Getenv("LOCKSTEP_TEST_PROGRAM"), image: "localhost/lockstep:" + os.Getenv("LOCKSTEP_TEST_VERSION"), client: http.Client{Timeout: 3 * time.Second}, lease: lease}
	c.Lab = Up(t, "NODES=6")
	for i := range 6 {
		c.Node("enter", fmt.Sprintf("n%d", i+1), "ctr", "-n", "k8s.io", "images", "import", os.Getenv("LOCKSTEP_TEST_IMAGES"))
	}
	c.losses = filepath.Join(c.Shared, "train", "loss.txt")
	if err := os.Mkdir(filepath.Join(c.Shared, "train"), 0o700); err != nil {
		t.Fatal(err)
	}
	c.secrets()
	for i := range 5 {
		c.Kubectl("label", "node", fmt.Sprintf("n%d", i+2), "lockstep.dev/pool=train")
	}
	c.Kubectl("taint", "node", "n6", "lockstep.dev/spare=:NoSchedule")
	c.charts()
	c.Apply(c.jobset())
	c.watch()
	c.wait("four ranks run", func() bool { return len(c.ranks(0)) == world && c.steps() > 20 })
	c.monitoring()
	return c
}

// secrets makes certificates, and the namespaces that have them.
func (c *chart) secrets() {
	pki := filepath.Join(c.t.TempDir(), "pki")
	make := func(args ...string) { c.Sh(c.lockstep, append([]string{"pki", args[0], "--dir", pki}, args[1:]...)...) }
	make("init")
	agents := []string{"ca.crt"}
	for i := range 6 {
		n := fmt.Sprintf("n%d", i+1)
		make("agent", "--node", n)
		agents = append(agents, "agent-"+n+".crt", "agent-"+n+".key")
	}
	make("remediator")
	make("master", "--job", "train", "--host", c.Address("n1"))
	secret := func(namespace, name string, files ...string) {
		args := []string{"-n", namespace, "create", "secret", "generic", name}
		for _, f := range files {
			args = append(args, "--from-file="+filepath.Join(pki, f))
		}
		c.Kubectl(args...)
	}
	c.Kubectl("create", "namespace", "lockstep")
	c.Kubectl("create", "namespace", "training")
	secret("lockstep", "lockstep-agents", agents...)
	secret("lockstep", "lockstep-remediator-tls", "ca.crt", "remediator.crt", "remediator.key")
	secret("training", "lockstep-master-train-tls", "ca.crt", "master-train.crt", "master-train.key")
	c.Kubectl("-n", "training", "create", "secret", "generic", "ranks", "--from-literal=secret="+strings.Repeat("0123456789abcdef", 4)) // of a cluster that lives for minutes
}

// volume is where a part keeps its state, on its node.
func (c *chart) volume(namespace, claim string) string {
	dir := filepath.Join(c.Shared, claim)
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, 65532, 65532)); err != nil {
		c.t.Fatal(err)
	}
	return fmt.Sprintf(`
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: %[2]s}
spec: {capacity: {storage: 2Gi}, accessModes: [ReadWriteOnce], storageClassName: "", hostPath: {path: %[3]s}, claimRef: {namespace: %[1]s, name: %[2]s}}
`, namespace, claim, dir)
}

func (c *chart) charts() {
	c.Apply(c.volume("lockstep", "lockstep-remediator") + c.volume("training", "lockstep-master-train"))
	values := filepath.Join(c.t.TempDir(), "values.yaml")
	if err := os.WriteFile(values, []byte(fmt.Sprintf(`
masters: ["train=%s:9401"]
remediator:
  nodeSelector: {kubernetes.io/hostname: n1}
  config:
    dry_run: false
    max_age: 2m
    policies:
    - {name: hang-communication, class: communication_hang, action: restart}
    - {name: hang-noncommunication, class: noncommunication_hang, action: restart}
    - {name: slow-link, class: communication_slow, action: restart}
    - {name: slow-rank, class: noncommunication_slow, action: restart_excluding}
    breaker: {window: 1h, job: 500, total: 500, unit_share: 1, units: 500}
  persistence: {storageClassName: ""}
  extraArgs: [--kubernetes.return-after=10s]
  extraEnv: [{name: KUBERNETES_SERVICE_HOST, value: "%s.1"}, {name: KUBERNETES_SERVICE_PORT, value: "6443"}]
`, c.Address("n1"), c.Net)), 0o600); err != nil {
		c.t.Fatal(err)
	}
	repository, tag, _ := strings.Cut(c.image, ":")
	image := "image.repository=" + repository + ",image.tag=" + tag + ",image.pullPolicy=Never"
	c.t.Setenv("KUBECONFIG", c.Kubeconfig)
	c.Sh(c.helm, "upgrade", "--install", "lockstep", filepath.Join(c.dir, "../helm/lockstep"), "-n", "lockstep", "--set", image, "-f", values)
	c.Sh(c.helm, "upgrade", "--install", "lockstep-master-train", filepath.Join(c.dir, "../helm/lockstep-master"), "-n", "training", "--set", image+`,job=train,hostNetwork=true,persistence.enabled=true,persistence.storageClassName=,nodeSelector.kubernetes\.io/hostname=n1`)
	c.Kubectl("-n", "lockstep", "rollout", "status", "--timeout", "150s", "daemonset/lockstep-agent")
	c.Kubectl("-n", "lockstep", "rollout", "status", "--timeout", "120s", "deployment/lockstep-remediator")
	c.Kubectl("-n", "training", "rollout", "status", "--timeout", "120s", "deployment/lockstep-master-train")
}

// jobset has a rank a node.
func (c *chart) jobset() string {
	return fmt.Sprintf(`
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: train, namespace: training}
spec:
  failurePolicy: {maxRestarts: 1000, restartStrategy: BlockingRecreate}
  replicatedJobs:
  - name: w
    replicas: 1
    template:
      spec:
        parallelism: %[1]d
        completions: %[1]d
        completionMode: Indexed
        backoffLimit: 0
        template:
          metadata: {labels: {lockstep.dev/job: train}}
          spec:
            hostNetwork: true
            restartPolicy: Never
            terminationGracePeriodSeconds: 1
            nodeSelector: {lockstep.dev/pool: train}
            tolerations:
            - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 3}
            - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 3}
            containers:
            - name: c
              image: %[2]s
              imagePullPolicy: Never
              args: [train, --dp=%[1]d, --pace=50ms, --dir=%[3]s/train, --meet=%[3]s/train, --address=$(HOST_IP)]
              resources: {limits: {lab.example/gpu: 8}}
              securityContext: {runAsUser: 0}
              env:
              - {name: LOCKSTEP_JOB, value: train}
              - {name: LOCKSTEP_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
              - {name: LOCKSTEP_FENCE, value: stop}
              - {name: LOCKSTEP_FENCE_LEASE, value: %[4]v}
              - {name: LOCKSTEP_FENCE_GRACE, value: 0s}
              - {name: LOCKSTEP_SECRET_FILE, value: /secret/secret}
              - {name: LOCKSTEP_NET, value: tcp}
              - {name: LOCKSTEP_LOCAL_RANK, value: "0"}
              - {name: LOCKSTEP_WORLD_SIZE, value: "%[1]d"}
              - {name: LOCKSTEP_RANK, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
              - {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
              - {name: MASTER_PORT, value: "29507"}
              - {name: JOBSET_NAME, value: train}
              - {name: JOBSET_RESTART_ATTEMPT, valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}}
              - {name: LOCKSTEP_RESTART_COUNT, valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}}
              volumeMounts: [{name: runtime, mountPath: /dev/shm/lockstep}, {name: shared, mountPath: %[3]s}, {name: secret, mountPath: /secret}]
            volumes:
            - {name: runtime, hostPath: {path: /dev/shm/lockstep, type: Directory}}
            - {name: shared, hostPath: {path: %[3]s}}
            - {name: secret, secret: {secretName: ranks, defaultMode: 0400}}
`, world, c.image, c.Shared, c.lease)
}

// monitoring starts Prometheus and Alertmanager beside the cluster, which reach its pods.
func (c *chart) monitoring() {
	c.Sh("ip", "route", "replace", c.Pods+".0.0/16", "via", c.Net+".1")
	c.t.Cleanup(func() { Try("ip", "route", "del", c.Pods+".0.0/16") })
	dir := c.t.TempDir()
	var b bytes.Buffer
	if err := rules.Generate(&b, rules.FastConfig()); err != nil {
		c.t.Fatal(err)
	}
	token, err := exec.Command("sh", "-c", "kubectl -n lockstep get secret lockstep-remediator-tokens -o jsonpath='{.data.token}' | base64 -d").Output()
	if err != nil {
		c.t.Fatal(err)
	}
	for name, content := range map[string][]byte{"rules.yml": b.Bytes(), "token": token} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
	at := c.Kubectl("-n", "lockstep", "get", "pods", "-l", "app.kubernetes.io/component=remediator", "-o", "jsonpath={.items[0].status.podIP}") + ":9410"
	c.stack, err = local.Start(c.t.Context(), local.Config{
		Dir: dir, RuleFiles: []string{filepath.Join(dir, "rules.yml")}, WebhookURL: "http://" + at + "/webhook", WebhookCredentialsFile: filepath.Join(dir, "token"),
		Targets: []local.Target{{Job: "lockstep-master", Addresses: []string{c.Address("n1") + ":9402"}}, {Job: "lockstep-remediator", Addresses: []string{at}}}, Progress: os.Stderr,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(c.stack.Stop)
}

// watch follows the JobSet's restarts.
func (c *chart) watch() {
	ctx, stop := context.WithCancel(c.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil { // a watch ends with its API server
			c.follow(ctx)
		}
	}()
	c.t.Cleanup(func() { stop(); <-done })
}

func (c *chart) follow(ctx context.Context) {
	cmd := exec.CommandContext(ctx, "kubectl", "-n", "training", "get", "jobset", "train", "-w", "-o", `jsonpath={.status.restarts}{"\n"}`)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return
	}
	for s := bufio.NewScanner(out); s.Scan(); {
		n, _ := strconv.Atoi(s.Text())
		c.mu.Lock()
		if n != c.restarts {
			c.restarts, c.restarted = n, time.Now()
		}
		c.mu.Unlock()
	}
	if cmd.Wait() != nil {
		time.Sleep(200 * time.Millisecond)
	}
}

func (c *chart) attempt() (int, time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.restarts, c.restarted
}

// rank is a process of the job, or another one of lockstep's.
type rank struct {
	pid, rank, attempt int
	node               string
}

// ranks are the processes of the job's attempts from one on.
func (c *chart) ranks(from int) (all []rank) {
	all = slices.DeleteFunc(c.processes("train"), func(p rank) bool { return p.attempt < from })
	slices.SortFunc(all, func(a, b rank) int { return a.rank - b.rank })
	return all
}

// processes of a command of lockstep's, of whatever node of this cluster: the machine sees all.
func (c *chart) processes(command string) (all []rank) {
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range dirs {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(line, []byte("lockstep\x00"+command+"\x00")) {
			continue
		}
		dir := filepath.Dir(file)
		if group, _ := os.ReadFile(filepath.Join(dir, "cgroup")); !bytes.Contains(group, []byte("/"+c.name+"/")) {
			continue
		}
		env, err := os.ReadFile(filepath.Join(dir, "environ"))
		if err != nil || len(env) == 0 { // a zombie has none
			continue
		}
		var p rank
		p.pid, _ = strconv.Atoi(filepath.Base(dir))
		for kv := range strings.SplitSeq(string(env), "\x00") {
			switch k, v, _ := strings.Cut(kv, "="); k {
			case "LOCKSTEP_NODE":
				p.node = v
			case "LOCKSTEP_RANK":
				p.rank, _ = strconv.Atoi(v)
			case "LOCKSTEP_RESTART_COUNT":
				p.attempt, _ = strconv.Atoi(v)
			}
		}
		all = append(all, p)
	}
	return all
}

func (c *chart) signal(p rank, s syscall.Signal) {
	if err := syscall.Kill(p.pid, s); err != nil {
		c.t.Fatalf("%v of rank %d: %v", s, p.rank, err)
	}
}

// starve leaves a rank one hundredth of a core.
func (c *chart) starve(p rank) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.pid))
	if err != nil {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case slices.Contains(strings.Split(part[1], ","), "cpu"):
			err = os.WriteFile(filepath.Join("/sys/fs/cgroup/cpu", part[2], "cpu.cfs_quota_us"), []byte("1000"), 0)
		case part[1] == "" && strings.Contains(part[2], "kubepods"):
			err = os.WriteFile(filepath.Join("/sys/fs/cgroup", part[2], "cpu.max"), []byte("1000 100000"), 0)
		default:
			continue
		}
		if err != nil {
			c.t.Fatal(err)
		}
		return
	}
	c.t.Fatalf("rank %d has no cgroup of its own: %s", p.rank, b)
}

// steps are those that the job has finished.
func (c *chart) steps() int {
	b, _ := os.ReadFile(c.losses)
	return bytes.Count(b, []byte("\n"))
}

func (c *chart) wait(what string, until func() bool) {
	c.t.Helper()
	for end := time.Now().Add(within); !until(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("after %v still not: %s\n%s", within, what, c.state())
		}
	}
}

// state is what there is, for whoever looks for a reason.
func (c *chart) state() string {
	var all []string
	for _, args := range [][]string{
		{"get", "pods,jobset,nodes", "-A", "-o", "wide"},
		{"get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.taints} {.metadata.annotations.lockstep\.dev/suspect} {.status.conditions[?(@.type=="Ready")]}{"\n"}{end}`},
		{"get", "leases", "-n", "kube-node-lease", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.renewTime}{"\n"}{end}`},
		{"get", "events", "-n", "training", "--sort-by=.lastTimestamp", "--no-headers"},
		{"logs", "-n", "lockstep", "deployment/lockstep-remediator", "--tail", "40"},
		{"logs", "-n", "training", "deployment/lockstep-master-train", "--tail", "40"},
	} {
		out, err := Try("kubectl", args...)
		if err != nil {
			out += err.Error()
		}
		if lines := strings.Split(out, "\n"); args[1] == "events" && len(lines) > 40 {
			out = strings.Join(lines[len(lines)-40:], "\n")
		}
		all = append(all, out)
	}
	return strings.Join(all, "\n")
}

// keep copies what the master has recorded to where it outlives the lab.
func (c *chart) keep(n int) string {
	to := filepath.Join(c.dir, "../../dist/lab", fmt.Sprintf("wrong-%d-%d", time.Now().Unix(), n))
	if err := os.CopyFS(to, os.DirFS(filepath.Join(c.Shared, "lockstep-master-train", "state"))); err != nil {
		return err.Error()
	}
	return to
}

var label = regexp.MustCompile(`([a-z_]+)="([^"]*)"`)

// verdict is the confirmed incident of an attempt that the master shows.
func (c *chart) verdict(attempt int) map[string]string {
	resp, err := c.client.Get("http://" + c.Address("n1") + ":9402/metrics")
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	for s := bufio.NewScanner(io.LimitReader(resp.Body, 16<<20)); s.Scan(); {
		if !strings.HasPrefix(s.Text(), names.IncidentInfo.Name+"{") {
			continue
		}
		l := map[string]string{}
		for _, m := range label.FindAllStringSubmatch(s.Text(), -1) {
			l[m[1]] = m[2]
		}
		if l[names.LabelLevel] == "confirmed" && l[names.LabelAttempt] == strconv.Itoa(attempt) {
			return l
		}
	}
	return nil
}

// alerted reports whether Alertmanager has an alert of an incident.
func (c *chart) alerted(incident string) bool {
	resp, err := c.client.Get(c.stack.AlertmanagerURL + "/api/v2/alerts?filter=" + names.LabelIncident + "%3D%22" + incident + "%22")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	var all []json.RawMessage
	return json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&all) == nil && len(all) > 0
}

// play breaks a rank's node, does besides what disturbs that, and waits until the job runs again and
// all nodes are back.
func (c *chart) play(f fault, victim int, disturb func()) (o outcome) {
	c.t.Helper()
	was, _ := c.attempt()
	before := c.steps()
	c.wait("the job runs undisturbed", func() bool { return len(c.ranks(was)) == world && c.steps() > before+int(settle/(50*time.Millisecond)) })
	old := c.ranks(0)
	if len(old) != world {
		c.t.Fatalf("%s: more than the job's ranks live: %+v", f.name, old)
	}
	p := old[victim]
	o.node = p.node
	at := time.Now()
	f.inject(c, p)
	var disturbed sync.WaitGroup
	if disturb != nil {
		disturbed.Go(disturb)
	}
	since := func() time.Duration { return time.Since(at) }
	wrong := func(format string, args ...any) { o.wrong = append(o.wrong, fmt.Sprintf(format, args...)) }
	var incident string
	var resumed int
	rebooted := false
	for o.running == 0 {
		if since() > within {
			wrong("it does not run again after %v: %s", within, c.state())
			c.t.Fatalf("%s: %v", f.name, o)
		}
		if o.verdict == 0 {
			if v := c.verdict(was); v != nil {
				o.verdict, incident = since(), v[names.LabelIncident]
				o.said = fmt.Sprintf("%s, %s, %s on %s", v[names.LabelClass], v[names.LabelReason], v[names.LabelCulprit], v[names.LabelNode])
				isTrue := v[names.LabelClass] == f.class && (f.reason == "" || v[names.LabelReason] == f.reason) && (v[names.LabelNode] == p.node || v[names.LabelCulprit] == p.node)
				if !isTrue && !rebooted { // which is another fault
					wrong("the verdict is %s", o.said)
				}
			}
		} else if o.alert == 0 && c.alerted(incident) {
			o.alert = since()
		}
		now, when := c.attempt()
		if f.class == "" && disturb != nil && !rebooted && now == was && since() > within/2 && c.steps() > before+int(within/4/(50*time.Millisecond)) {
			// Kubernetes forgets to delete the pods when its API server is away at that moment. Nothing is
			// wrong with the job, until somebody reboots the node.
			rebooted = true
			c.t.Logf("%s: %s: its pods were not deleted, and the job has gone on; the node is rebooted", f.name, p.node)
			f.heal(c, p.node)
		}
		if now > was && o.action == 0 {
			o.action = when.Sub(at)
		}
		living := c.ranks(0)
		if o.ended == 0 && !slices.ContainsFunc(living, func(p rank) bool { return p.attempt <= was }) {
			o.ended = since()
		}
		if now > was && len(c.ranks(now)) == world {
			switch n := c.steps(); {
			case resumed == 0:
				resumed = n
			case n > resumed+1: // one may have been under way when the log was read
				o.running = since()
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	c.t.Logf("%s: %v", f.name, o)
	disturbed.Wait()
	now, _ := c.attempt()
	if now != was+1 {
		wrong("attempt %d led to %d", was, now)
	}
	if f.class != "" && o.verdict == 0 && disturb == nil {
		wrong("no verdict")
	}
	for _, r := range c.ranks(0) {
		if r.attempt <= was && !(f.unplugged && r.node == p.node) {
			wrong("rank %d of attempt %d lives on %s beside the next attempt", r.rank, r.attempt, r.node)
		}
	}
	moved := !slices.ContainsFunc(c.ranks(now), func(r rank) bool { return r.node == p.node })
	if moved != f.moves && !rebooted {
		wrong("the job has left its node: %v, and should: %v", moved, f.moves)
	}
	for n := range strings.FieldsSeq(c.Kubectl("get", "nodes", "-l", "lockstep.dev/suspect", "-o", "jsonpath={.items[*].metadata.name}")) {
		if !f.moves || n != p.node {
			wrong("node %s is out, with which nothing is wrong", n)
		}
	}
	if f.heal != nil && !rebooted {
		f.heal(c, p.node)
	}
	c.wait("all nodes are back, one of them as the spare", func() bool {
		nodes := c.Kubectl("get", "nodes", "--no-headers")
		spares := c.Kubectl("get", "nodes", "-o", `jsonpath={.items[*].spec.taints[?(@.key=="lockstep.dev/spare")].effect}`)
		return strings.Count(nodes, " Ready ") == 6 && !strings.Contains(nodes, "SchedulingDisabled") && len(strings.Fields(spares)) == 1 && c.agents() == 6
	})
	c.wait("nothing of the old attempt lives", func() bool { return !slices.ContainsFunc(c.ranks(0), func(r rank) bool { return r.attempt <= was }) })
	return o
}

// agents are those that are ready.
func (c *chart) agents() (n int) {
	_, _ = fmt.Sscan(c.Kubectl("-n", "lockstep", "get", "daemonset", "lockstep-agent", "-o", "jsonpath={.status.numberReady}"), &n)
	return n
}

// uninstall takes the charts away beside the job.
func (c *chart) uninstall() {
	pods := func() string {
		return c.Kubectl("-n", "training", "get", "pods", "-l", "lockstep.dev/job=train", "-o", `jsonpath={range .items[*]}{.metadata.uid} {.status.phase} {.status.containerStatuses[0].restartCount}{"\n"}{end}`)
	}
	before := pods()
	c.Sh(c.helm, "uninstall", "lockstep", "-n", "lockstep")
	c.Sh(c.helm, "uninstall", "lockstep-master-train", "-n", "training")
	c.wait("the charts' pods are gone", func() bool { return strings.HasPrefix(c.Kubectl("-n", "lockstep", "get", "pods"), "No resources") })
	n := c.steps()
	c.wait("the job goes on", func() bool { return c.steps() > n+20 })
	if after := pods(); after != before {
		c.t.Errorf("uninstalling touched the job: %s, then %s", before, after)
	}
}

// sameLosses ends the job, and trains as long without faults.
func (c *chart) sameLosses() {
	c.Kubectl("-n", "training", "delete", "jobset", "train", "--cascade=foreground", "--timeout=60s")
	got, err := os.ReadFile(c.losses)
	if err != nil {
		c.t.Fatal(err)
	}
	dir := c.t.TempDir()
	steps := bytes.Count(got, []byte("\n"))
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, c.lockstep, "run", "--job", "reference", "--ranks", strconv.Itoa(world), "--dir", filepath.Join(dir, "run"), "--runtime-dir", filepath.Join(dir, "rt"), "--quiet", "--",
		c.lockstep, "train", "--dp", strconv.Itoa(world), "--dir", dir, "--steps", strconv.Itoa(steps)).CombinedOutput()
	if err != nil {
		c.t.Fatalf("the run without faults: %v: %s", err, out)
	}
	want, err := os.ReadFile(filepath.Join(dir, "loss.txt"))
	if err != nil {
		c.t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		a, b := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
		for i := range min(len(a), len(b)) {
			if a[i] != b[i] {
				c.t.Fatalf("losses differ from an undisturbed run's: %q and %q", a[i], b[i])
			}
		}
		c.t.Fatalf("%d losses, and %d of an undisturbed run", len(a), len(b))
	}
	c.t.Logf("the losses of all %d steps are those of an undisturbed run, bit for bit", steps)
}
