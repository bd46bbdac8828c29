package kubernetes

import (
	"context"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// kwokCluster is a real control plane on loopback (etcd, API server, controller manager,
// scheduler, JobSet's controller), and KWOK in the place of kubelets. It needs no root.
type kwokCluster struct {
	t      *testing.T
	bin    string
	dir    string
	url    string
	config *rest.Config // of an administrator
	client dynamic.Interface

	mu     sync.Mutex
	ended  map[string]error
	server *exec.Cmd          // the API server
	args   []string           // its
	killed map[*exec.Cmd]bool // by us
	n      int
	back   []time.Time // when it was started again
}

// kwokAlive is the label of the nodes that KWOK is the kubelet of. There are two KWOKs: the
// leases of the pool's nodes are renewed by a beat.
const kwokAlive = "lockstep.test/power"

func newKWOKCluster(t *testing.T) *kwokCluster {
	if os.Getenv("LOCKSTEP_TEST_KWOK") == "" {
		t.Skip("make test-kwok runs this: it needs a cluster's programs, which take minutes to build once")
	}
	c := &kwokCluster{t: t, bin: os.Getenv("LOCKSTEP_TEST_KWOK"), dir: t.TempDir(), ended: map[string]error{}, killed: map[*exec.Cmd]bool{}}
	etcd, peer, api := freePort(t), freePort(t), freePort(t)
	c.url = "https://127.0.0.1:" + api
	token := fmt.Sprintf("t%d", time.Now().UnixNano())
	c.write("tokens.csv", token+",admin,admin,system:masters\n")
	c.write("audit.yaml", auditPolicy)
	c.write("kubeconfig", fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}]\nusers: [{name: u, user: {token: %s}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n", c.url, token))
	c.write("scheduler.yaml", "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nleaderElection: {leaderElect: false}\nclientConnection: {kubeconfig: "+c.dir+"/kubeconfig, qps: 300, burst: 400}\n")
	c.sh("openssl", "genrsa", "-out", "sa.key", "2048")
	c.sh("openssl", "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")

	c.start("etcd", "--data-dir=etcd", "--unsafe-no-fsync", "--log-level=error", "--quota-backend-bytes=4000000000", "--auto-compaction-mode=periodic", "--auto-compaction-retention=2m",
		"--listen-client-urls=http://127.0.0.1:"+etcd, "--advertise-client-urls=http://127.0.0.1:"+etcd,
		"--listen-peer-urls=http://127.0.0.1:"+peer, "--initial-advertise-peer-urls=http://127.0.0.1:"+peer, "--initial-cluster=default=http://127.0.0.1:"+peer)
	c.args = []string{
		"--etcd-servers=http://127.0.0.1:" + etcd, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + api, "--cert-dir=certs",
		"--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=sa.pub", "--service-account-signing-key-file=sa.key",
		"--token-auth-file=tokens.csv", "--authorization-mode=RBAC", "--endpoint-reconciler-type=none", "--shutdown-delay-duration=0s", "--event-ttl=10m", "--feature-gates=WatchList=false", // for which Debian's etcd 3.4 is too old
		"--audit-policy-file=audit.yaml", "--audit-log-path=audit.log", "--audit-log-maxsize=2000",
		"--default-not-ready-toleration-seconds=5", "--default-unreachable-toleration-seconds=5",
	}
	c.server = c.start("kube-apiserver", c.args...)
	c.config = &rest.Config{Host: c.url, BearerToken: token, TLSClientConfig: rest.TLSClientConfig{Insecure: true}, QPS: -1, Timeout: time.Minute, DisableCompression: true}
	var err error
	config := rest.CopyConfig(c.config)
	config.Timeout = 4 * time.Minute
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return patient{rt} })
	if c.client, err = dynamic.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	c.until("the API server is ready", func() bool { return c.ready(c.url + "/readyz") })
	c.start("kube-controller-manager", "--kubeconfig=kubeconfig", "--bind-address=127.0.0.1", "--secure-port="+freePort(t), "--cert-dir=certs", "--leader-elect=false",
		"--service-account-private-key-file=sa.key", "--controllers=*,-bootstrap-signer-controller,-token-cleaner-controller", "--node-monitor-grace-period=40s", "--node-monitor-period=2s",
		"--kube-api-qps=300", "--kube-api-burst=400")
	c.start("kube-scheduler", "--config=scheduler.yaml", "--bind-address=127.0.0.1", "--secure-port="+freePort(t), "--cert-dir=certs")
	c.jobSet()
	stages, err := filepath.Abs("../../deploy/kubelab/manifests/kwok-stages.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for of, lease := range map[string]int{"pool": 0, "others": 40} { // seconds; 0: renewed elsewhere
		c.startAs("kwok-"+of, "kwok", "--kubeconfig=kubeconfig", "--manage-all-nodes=false", "--manage-nodes-with-label-selector="+kwokAlive+"="+of, fmt.Sprintf("--node-lease-duration-seconds=%d", lease),
			"--node-ip=127.0.0.1", "--node-port=0", "--server-address=127.0.0.1:"+freePort(t), "--config="+stages, "--v=warn")
	}
	return c
}

// auditPolicy notes down what the remediator asks, and nothing else.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, users: ["system:serviceaccount:lockstep:lockstep-remediator"]}
- {level: None}
`

// jobSet starts JobSet's controller, with its webhooks for JobSets.
func (c *kwokCluster) jobSet() {
	hook, metrics, health := freePort(c.t), freePort(c.t), freePort(c.t)
	c.sh("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=jobset", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt")
	c.write("jobset.yaml", fmt.Sprintf("apiVersion: config.jobset.x-k8s.io/v1alpha1\nkind: Configuration\nleaderElection: {leaderElect: false}\ninternalCertManagement: {enable: false}\nclientConnection: {qps: 300, burst: 400}\nwebhook: {port: %s, host: 127.0.0.1, certDir: %q}\nmetrics: {bindAddress: \"127.0.0.1:%s\", certDir: %q}\nhealth: {healthProbeBindAddress: \"127.0.0.1:%s\"}\n", hook, c.dir, metrics, c.dir, health))
	c.kubectl("apply", "--server-side", "-f", filepath.Join(filepath.Dir(c.bin), "jobset-crd.yaml"))
	crt, err := os.ReadFile(filepath.Join(c.dir, "tls.crt"))
	if err != nil {
		c.t.Fatal(err)
	}
	hooks, err := os.ReadFile("../../deploy/kubelab/manifests/jobset-webhooks.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	text := strings.NewReplacer("@URL@", "https://127.0.0.1:"+hook, "@CA@", base64.StdEncoding.EncodeToString(crt)).Replace(string(hooks))
	c.write("webhooks.yaml", text)
	c.kubectl("apply", "-f", "webhooks.yaml")
	c.start("jobset", "--config=jobset.yaml", "--zap-log-level=info")
	c.until("JobSet's controller is ready", func() bool { return c.ready("http://127.0.0.1:" + health + "/readyz") })
}

// freePort is one below those that the kernel gives to connections, so that none of the
// cluster's own takes it before its program listens; no two are the same.
func freePort(t *testing.T) string {
	for range 1000 {
		port := 20000 + (os.Getpid()*37+int(ports.Add(1)))%12000
		if l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port)); err == nil {
			l.Close()
			return fmt.Sprint(port)
		}
	}
	t.Fatal("no free port between 20000 and 32000")
	return ""
}

var ports atomic.Int64

func (c *kwokCluster) write(name, text string) {
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

func (c *kwokCluster) sh(name string, args ...string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = c.dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (c *kwokCluster) kubectl(args ...string) string {
	c.t.Helper()
	return c.sh(filepath.Join(c.bin, "kubectl"), append([]string{"--kubeconfig=kubeconfig"}, args...)...)
}

// start runs a program until the test ends. It dies with the test's process.
func (c *kwokCluster) start(program string, args ...string) *exec.Cmd {
	return c.startAs(program, program, args...)
}

func (c *kwokCluster) startAs(name, program string, args ...string) *exec.Cmd {
	log, err := os.Create(filepath.Join(c.dir, name+".log"))
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(c.bin, program), args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.dir, log, log
	cmd.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.dir+"/kubeconfig", "KUBE_FEATURE_WatchListClient=false")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		c.t.Fatalf("%s: %v: run deploy/kubelab/build", name, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := cmd.Wait()
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.killed[cmd] {
			c.ended[name] = fmt.Errorf("%s has ended: %v", name, err)
		}
	}()
	c.t.Cleanup(func() {
		cmd.Process.Kill()
		<-done
		if keep := os.Getenv("LOCKSTEP_TEST_KWOK_LOGS"); keep != "" {
			log.Seek(0, 0)
			if text, err := os.ReadFile(log.Name()); err == nil {
				os.WriteFile(filepath.Join(keep, name+".log"), text, 0o600)
			}
		}
		log.Close()
	})
	return cmd
}

// killServer kills the API server with SIGKILL, and starts it again after a while, on what etcd has.
func (c *kwokCluster) killServer(down time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.killed[c.server] {
		return // it is away
	}
	c.killed[c.server] = true
	c.server.Process.Kill()
	c.n++
	name := fmt.Sprint("kube-apiserver-", c.n)
	time.AfterFunc(down, func() {
		if c.t.Context().Err() != nil {
			return
		}
		cmd := c.startAs(name, "kube-apiserver", c.args...)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.server, c.back = cmd, append(c.back, time.Now())
	})
}

// patient asks again while the API server is away, or starts: what the test itself does is not what is tested.
type patient struct{ next http.RoundTripper }

// WrappedRoundTripper lets client-go cancel requests.
func (p patient) WrappedRoundTripper() http.RoundTripper { return p.next }

func (p patient) RoundTrip(r *http.Request) (*http.Response, error) {
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		resp, err := p.next.RoundTrip(r)
		if err == nil && resp.StatusCode != http.StatusServiceUnavailable || r.Context().Err() != nil || time.Now().After(end) {
			return resp, err
		}
		if err == nil {
			resp.Body.Close()
		}
		if r.GetBody != nil {
			if r.Body, err = r.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// alive fails the test when a program of the cluster has ended.
func (c *kwokCluster) alive() {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, err := range c.ended {
		text, _ := os.ReadFile(filepath.Join(c.dir, name+".log"))
		c.t.Fatalf("%v\n%s", err, text[max(0, len(text)-2000):])
	}
}

func (c *kwokCluster) ready(url string) bool {
	client, err := rest.HTTPClientFor(c.config)
	if err != nil {
		c.t.Fatal(err)
	}
	r, err := client.Get(url)
	if err != nil {
		return false
	}
	r.Body.Close()
	return r.StatusCode == http.StatusOK
}

func (c *kwokCluster) until(what string, ok func() bool) {
	c.t.Helper()
	for end := time.Now().Add(10 * time.Minute); !ok(); time.Sleep(500 * time.Millisecond) {
		c.alive()
		if time.Now().After(end) {
			c.t.Fatalf("it did not come to that within ten minutes: %s", what)
		}
	}
}

// list is as the API server's cache has it, a moment old; exact when it is the truth that is asked for.
func (c *kwokCluster) list(r schema.GroupVersionResource, ns, selector string, exact ...bool) []unstructured.Unstructured {
	c.t.Helper()
	o := metav1.ListOptions{LabelSelector: selector, ResourceVersion: "0"}
	if len(exact) > 0 {
		o.ResourceVersion = ""
	}
	for try := 0; ; try++ {
		l, err := c.client.Resource(r).Namespace(ns).List(c.t.Context(), o)
		if err == nil {
			return l.Items
		}
		c.alive()
		if try == 5 {
			c.t.Fatal(err)
		}
		time.Sleep(time.Second)
	}
}
