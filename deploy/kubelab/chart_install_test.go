package kubelab

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/rules"
)

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
