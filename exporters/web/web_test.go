package web_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/crypto/bcrypt"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func snapshot() *collector.MasterSnapshot {
	at := time.Now()
	nan := float32(math.NaN())
	return &collector.MasterSnapshot{
		Job: "llama-70b", At: at, Attempt: 2, WorldSize: 8, Step: 4211, DiagnosisLast: 180 * time.Microsecond,
		Ranks: map[diagnosis.ProcState]int{diagnosis.ProcRunning: 7, diagnosis.ProcStopped: 1},
		Agents: []collector.AgentStatus{
			{Node: "gpu-01", Connected: true, LastSeen: at, Ranks: 4, MapError: 12 * time.Microsecond},
			{Node: "gpu-02", Lost: true, LastSeen: at.Add(-90 * time.Second), Ranks: 4},
		},
		Incidents: []collector.Incident{
			{
				ID: "llama-70b-2-2", Opened: at, Attempt: 2,
				Verdict: diagnosis.Verdict{
					Class: diagnosis.CommunicationSlow, Level: diagnosis.Suspected, CommName: "tp", Coll: record.AllGather, Seq: 31, Victims: 1,
					Since:    at.Add(-time.Second).UnixNano(),
					Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 2, Peer: 6, Node: "gpu-01", Reason: "network"}},
				},
			},
			{
				ID: "llama-70b-2-1", Opened: at.Add(-3 * time.Second), Confirmed: at.Add(-time.Second), Attempt: 2, TraceID: [16]byte{0xab},
				Verdict: diagnosis.Verdict{
					Class: diagnosis.NoncommunicationHang, Level: diagnosis.Confirmed, CommName: "dp", Coll: record.AllReduce, Seq: 977, Victims: 7,
					Since:    at.Add(-4 * time.Second).UnixNano(),
					Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritRank, Rank: 5, Peer: -1, Node: "gpu-02", Reason: "process_stopped"}},
					Why:      []string{"7 of 8 members entered AllReduce 977 on dp; rank 5 did not.", "rank 5 (pid 4242) has been stopped for 4.0 s."},
				},
			},
			{
				ID: "llama-70b-1-1", Opened: at.Add(-2 * time.Hour), Closed: at.Add(-119 * time.Minute),
				Verdict: diagnosis.Verdict{
					Class: diagnosis.CommunicationHang, Level: diagnosis.Confirmed,
					Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritNode, Rank: -1, Peer: -1, Node: "gpu-02"}},
				},
			},
		},
		Delay: []collector.DelayMatrix{{Comm: "tp", Size: 3, Ratio: []float32{nan, 1, 1.3, 1.1, nan, 5.2, 0.9, 1.7, nan}, World: []int32{0, 2, 6}}},
	}
}

// start runs a server and returns a function that fetches a path from it.
func start(t *testing.T, o web.Options) func(path string) (*http.Response, string) {
	t.Helper()
	s := run(t, o)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	return func(path string) (*http.Response, string) {
		t.Helper()
		return get(t, client, "http://"+s.Addr().String()+path)
	}
}

func run(t *testing.T, o web.Options) *web.Server {
	t.Helper()
	o.Listen, o.Title = "127.0.0.1:0", "Lockstep <master>"
	o.Log = slog.New(slog.DiscardHandler)
	if o.Metrics == nil {
		o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "up 1\n") })
	}
	s, err := web.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(serve(t, s))
	return s
}

// serve runs a server until stop is called.
func serve(t *testing.T, s *web.Server) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
}

func get(t *testing.T, client *http.Client, url string) (*http.Response, string) {
	t.Helper()
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

func TestRoutes(t *testing.T) {
	var notReady error
	fetch := start(t, web.Options{Version: "1.2.3", Status: snapshot, Ready: func() error { return notReady }})
	for _, tt := range []struct {
		path   string
		status int
		want   string
	}{
		{"/", 200, "Lockstep &lt;master&gt;"},
		{"/", 200, `href="/status"`},
		{"/metrics", 200, "up 1"},
		{"/-/healthy", 200, "healthy"},
		{"/-/ready", 200, "ready"},
		{"/nowhere", 404, ""},
		{"/debug/pprof/", 404, ""},
	} {
		if resp, body := fetch(tt.path); resp.StatusCode != tt.status || !strings.Contains(body, tt.want) {
			t.Errorf("GET %s: %d, want %d with %q:\n%s", tt.path, resp.StatusCode, tt.status, tt.want, body)
		}
	}
	notReady = errors.New("no agent has connected")
	if resp, body := fetch("/-/ready"); resp.StatusCode != 503 || !strings.Contains(body, "no agent") {
		t.Errorf("not ready: %d %q", resp.StatusCode, body)
	}
}

func TestStatusPageTellsTheStory(t *testing.T) {
	fetch := start(t, web.Options{Status: snapshot})
	resp, body := fetch("/status")
	if got := resp.Header.Get("Content-Type"); got != "text/html; charset=utf-8" {
		t.Errorf("Content-Type %q", got)
	}
	for _, want := range []string{
		"<title>noncommunication_hang · llama-70b · lockstep</title>", "2 open incidents, 1 confirmed",
		"rank 5", "on gpu-02", "(process_stopped)", "7 ranks held up", "AllReduce 977 on dp", "rank 5 (pid 4242) has been stopped for 4.0 s.",
		"rank 2 → rank 6", "1 rank held up", "node gpu-02", `<td class="bad">5.2</td>`, `<td class="h0">1.1</td>`,
		"4211", "1 h 59 min ago", "180µs", `class="lost"`, `<noscript><meta http-equiv="refresh" content="2"></noscript>`, "ab000000000000000000000000000000",
		`href="runbooks/LockstepNoncommunicationHang"`, "<b>onset</b>", "<b>confirmed</b>", `<th scope="row">6</th>`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("page lacks %q", want)
		}
	}
	if strings.Index(body, "noncommunication_hang, since") > strings.Index(body, "communication_slow, since") {
		t.Error("a suspected incident comes before a confirmed one")
	}
	for _, not := range []string{"src=", "http://", "https://", "Stale"} {
		if strings.Contains(body, not) {
			t.Errorf("page has %q", not)
		}
	}
	if n := strings.Count(body, "<script"); n != 1 {
		t.Errorf("%d scripts", n)
	}
	if _, body := fetch("/status?refresh=0"); strings.Contains(body, "http-equiv") {
		t.Error("refresh=0 still refreshes")
	}
	for _, tag := range []string{"style", "script"} {
		_, own, _ := strings.Cut(body, "<"+tag+">")
		own, _, _ = strings.Cut(own, "</"+tag+">")
		sum := sha256.Sum256([]byte(own))
		if policy := resp.Header.Get("Content-Security-Policy"); !strings.Contains(policy, tag+"-src 'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"'") {
			t.Errorf("the policy %q does not allow the page's own %s", policy, tag)
		}
	}
}

func TestStatusPageEscapes(t *testing.T) {
	const evil = `"><script>alert(1)</script>`
	s := snapshot()
	s.Job, s.Agents[0].Node, s.Delay[0].Comm = evil, evil, evil
	in := &s.Incidents[0]
	in.ID, in.Verdict.CommName, in.Verdict.Why = evil, evil, []string{evil}
	in.Verdict.Culprits[0].Node, in.Verdict.Culprits[0].Reason = evil, evil
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot { return s }})
	if _, body := fetch("/status"); strings.Contains(body, "<script>alert") || strings.Count(body, "&lt;script&gt;") < 8 {
		t.Errorf("not escaped:\n%s", body)
	}
}

// TestStatusConnections: the page names queue pair, NIC, port, rail and peer of what is slow;
// what has nothing to tell is folded away.
func TestStatusConnections(t *testing.T) {
	const evil = "<b>evil"
	s := snapshot()
	s.Connections = []collector.ConnDetail{
		{
			Comm: "dp", Rank: 3, Peer: 1, PeerWorld: 11, BytesPerSec: 12.5e6, LatencyNs: 84e3, Cause: record.CauseNetwork, Windows: 912, Slow: 40, Switches: 2, Resent: 65536, RTTNs: 7e6,
			Conn: collector.Conn{Transport: record.TransportRDMA, QP: 417, PeerQP: 5318, NIC: "mlx5_2", Port: 1, Rail: 3, Address: "fe80::1", Name: "mlx5_2/1->mlx5_6/1"},
		},
		{Comm: evil, Rank: 0, Peer: 1, PeerWorld: -1, Conn: collector.Conn{Transport: record.TransportTCP, Name: evil, Address: evil}},
	}
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot { return s }})
	_, body := fetch("/status")
	for _, want := range []string{
		"3 → 11", "417 → 5318", "mlx5_2/1, rail 3", "fe80::1", "rdma", "network", "912, 40", "12.5 MB/s, 84µs", "took over 2×, 65536 bytes sent again", "7ms RTT",
		"1 connection with nothing to tell", "0 → ?", "&lt;b&gt;evil",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("page lacks %q", want)
		}
	}
	if strings.Contains(body, evil) {
		t.Error("a connection's words are not escaped")
	}
	if told := strings.Index(body, "417 → 5318"); told > strings.Index(body, "1 connection with nothing to tell") {
		t.Error("the slow connection is folded away")
	}
	s.Connections = s.Connections[1:]
	if _, body := fetch("/status"); !strings.Contains(body, "No connection is slow or broken.") {
		t.Error("nothing is said of connections that have nothing to tell")
	}
}

func TestStatusStates(t *testing.T) {
	s := snapshot()
	s.Incidents, s.Delay = nil, nil
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot { return s }})
	if _, body := fetch("/status"); !strings.Contains(body, "1 of 2 agents are lost") || strings.Contains(body, "Healthy") {
		t.Errorf("lost agent:\n%s", body)
	}
	s.Agents = s.Agents[:1]
	if _, body := fetch("/status"); !strings.Contains(body, "Healthy: no open incident.") {
		t.Errorf("healthy job:\n%s", body)
	}
	s.Agents = nil
	if _, body := fetch("/status"); !strings.Contains(body, "No agent has connected") || strings.Contains(body, "Healthy") {
		t.Errorf("job without agents:\n%s", body)
	}
	s.At = s.At.Add(-time.Minute)
	if _, body := fetch("/status"); !strings.Contains(body, "Stale: the master last published 1 min") {
		t.Errorf("stale snapshot:\n%s", body)
	}
	s = nil
	if resp, body := fetch("/status"); resp.StatusCode != 200 || !strings.Contains(body, "not published anything yet") {
		t.Errorf("no snapshot: %d\n%s", resp.StatusCode, body)
	}
	if resp, _ := fetch("/api/v1/status"); resp.StatusCode != 503 {
		t.Errorf("no snapshot: JSON answers %d", resp.StatusCode)
	}
}

func TestStatusJSON(t *testing.T) {
	fetch := start(t, web.Options{Status: snapshot})
	resp, body := fetch("/api/v1/status")
	if resp.Header.Get("Content-Type") != "application/json" {
		t.Errorf("Content-Type %q", resp.Header.Get("Content-Type"))
	}
	var got web.Status
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if got.Health != "confirmed" || len(got.Open) != 2 || got.Open[0].Culprits[0].Name != "rank 5" || len(got.Closed) != 1 || got.Closed[0].Confirmed != nil {
		t.Errorf("incidents: %+v", got)
	}
	if got.Open[0].Recording != "" {
		t.Errorf("a recording where nothing is recorded: %q", got.Open[0].Recording)
	}
	m := got.Delay[0]
	if m.Ratio[0][0] != nil || m.Ratio[1][2] == nil || len(m.Worst) != 2 || m.Worst[0].Source != 1 || m.Worst[0].Destination != 2 {
		t.Errorf("delay matrix: %+v", m)
	}
}

func TestStatusNamesRecordings(t *testing.T) {
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot {
		s := snapshot()
		s.Recording = &collector.RecordingStatus{}
		return s
	}})
	_, body := fetch("/api/v1/status")
	var got web.Status
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if got.Open[0].Recording != "llama-70b-2-1.evidence" || got.Closed[0].Recording != "llama-70b-1-1.evidence" {
		t.Errorf("recordings %q, %q", got.Open[0].Recording, got.Closed[0].Recording)
	}
}

func TestLargeMatrixShowsItsWorst(t *testing.T) {
	const size = 64
	s := snapshot()
	s.Delay = []collector.DelayMatrix{{Comm: "dp", Size: size, Ratio: make([]float32, size*size)}, {Comm: "torn", Size: 9, Ratio: []float32{1}}}
	s.Delay[0].Ratio[3*size+7] = 8
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot { return s }})
	if _, body := fetch("/status"); !strings.Contains(body, `<td>? (3)</td><td>? (7)</td><td class="h4">8.0</td>`) || strings.Contains(body, `class="heat"`) || strings.Contains(body, "torn") {
		t.Errorf("page:\n%s", body)
	}
}

func TestTLSAndBasicAuth(t *testing.T) {
	dir := t.TempDir()
	pool := selfSigned(t, dir)
	hash, err := bcrypt.GenerateFromPassword([]byte("correct horse"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "web.yml")
	write(t, config, fmt.Sprintf("tls_server_config: {cert_file: cert.pem, key_file: key.pem}\nbasic_auth_users: {sre: %q}\n", hash))
	s := run(t, web.Options{ConfigFile: config, PprofListen: "127.0.0.1:0"})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	t.Cleanup(client.CloseIdleConnections)
	for _, addr := range []net.Addr{s.Addr(), s.PprofAddr()} {
		path := map[bool]string{true: "/metrics", false: "/debug/pprof/cmdline"}[addr == s.Addr()]
		if resp, _ := get(t, client, "https://"+addr.String()+path); resp.StatusCode != 401 {
			t.Errorf("%s without a password: %d, want 401", path, resp.StatusCode)
		}
		if resp, _ := get(t, client, "https://sre:correct%20horse@"+addr.String()+path); resp.StatusCode != 200 {
			t.Errorf("%s with the password: %d, want 200", path, resp.StatusCode)
		}
	}
}

func TestBadConfigurationFailsBeforeServing(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	bad := filepath.Join(t.TempDir(), "web.yml")
	write(t, bad, "tls_server_config: {certfile: oops}\n")
	for name, o := range map[string]web.Options{
		"unknown key":      {Listen: "127.0.0.1:0", ConfigFile: bad},
		"missing file":     {Listen: "127.0.0.1:0", ConfigFile: bad + ".not"},
		"taken port":       {Listen: taken.Addr().String()},
		"taken pprof port": {Listen: "127.0.0.1:0", PprofListen: taken.Addr().String()},
	} {
		o.Metrics, o.Log = http.NotFoundHandler(), slog.New(slog.DiscardHandler)
		if _, err := web.New(o); err == nil {
			t.Errorf("%s: accepted", name)
		} else {
			t.Logf("%s: %v", name, err)
		}
	}
}

func TestShutdownLetsRequestsFinish(t *testing.T) {
	began, release := make(chan struct{}), make(chan struct{})
	s, err := web.New(web.Options{
		Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler),
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			close(began)
			<-release
			io.WriteString(w, "late")
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	body := make(chan string, 1)
	go func() {
		resp, err := http.Get("http://" + s.Addr().String() + "/metrics")
		if err != nil {
			body <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		body <- string(b)
	}()
	<-began
	cancel()
	close(release)
	if got := <-body; got != "late" {
		t.Errorf("request in flight got %q", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
}

func selfSigned(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "lockstep test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	write(t, filepath.Join(dir, "cert.pem"), string(cert))
	write(t, filepath.Join(dir, "key.pem"), string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(cert)
	return pool
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
