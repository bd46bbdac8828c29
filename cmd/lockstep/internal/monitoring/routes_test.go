package monitoring

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/local"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/internal/ports"
)

// TestAmtool builds amtool once: make test-monitoring.
func TestAmtool(t *testing.T) {
	if os.Getenv("LOCKSTEP_TEST_MONITORING") == "" {
		t.Skip("make test-monitoring runs it")
	}
	amtool := tool(t, "amtool")
	for name, config := range configurations {
		t.Run(name, func(t *testing.T) {
			file := "--config.file=" + filepath.Join(written(t, config), alertmanagerFile)
			check(t, amtool, "check-config", strings.TrimPrefix(file, "--config.file="))
			for labels, want := range map[string]string{
				"alertname=LockstepCommunicationHang severity=critical incident=llm-1 training_job=llm": remediator + "," + now,
				"alertname=LockstepFaultSuspected severity=warning incident=llm-1 level=suspected":      remediator + "," + today,
				"alertname=LockstepGPUThrottled severity=warning instance=n1:9400":                      today,
				"alertname=LockstepTraceDrops severity=info":                                            nobody,
				"alertname=Watchdog severity=critical":                                                  today,
			} {
				args := append([]string{"config", "routes", "test", file, "--verify.receivers=" + want}, strings.Fields(labels)...)
				check(t, amtool, args...)
			}
		})
	}
}

// TestEveryClassIsMutedOrMutes: a job that stands still is slow as well, so that of each
// class either the alert mutes those of slowness, or is muted.
func TestEveryClassIsMutedOrMutes(t *testing.T) {
	for _, m := range mutes() {
		if m.why != standing {
			continue
		}
		for _, class := range names.Classes {
			one := regexp.MustCompile(`["|]` + names.VerdictAlerts[class] + `["|]`)
			if one.MatchString(m.source[0]) == one.MatchString(m.target[0]) {
				t.Errorf("%s: %v mutes %v, and %s has to be in one of them", standing, m.source, m.target, names.VerdictAlerts[class])
			}
		}
		return
	}
	t.Errorf("no mute is there because %s", standing)
}

// TestInhibition asks a real Alertmanager with the generated configuration what is muted.
func TestInhibition(t *testing.T) {
	if testing.Short() {
		t.Skip("Alertmanager is not under the race detector")
	}
	url := alertmanager(t, filepath.Join(written(t, "testdata/site.yaml"), alertmanagerFile))
	alert := func(name string, labels ...string) map[string]any {
		l := map[string]string{"alertname": name}
		for i := 0; i < len(labels); i += 2 {
			l[labels[i]] = labels[i+1]
		}
		return map[string]any{"labels": l}
	}
	const muted, sent = "suppressed", "active"
	cases := []struct {
		alert map[string]any
		state string
	}{
		{alert("LockstepNoncommunicationHang", "severity", "critical", "level", "confirmed", "training_job", "llm", "node", "n1", "incident", "llm-1"), sent},
		{alert("LockstepGPUThrottled", "severity", "warning", "instance", "n1:9400", "node", "n1", "gpu", "3"), muted},
		{alert("LockstepNICRetransmissions", "severity", "warning", "instance", "n1:9400", "node", "n1"), muted},
		{alert("LockstepNICCongestion", "severity", "info", "instance", "n1:9400", "node", "n1"), muted},
		{alert("LockstepConnectionPathDown", "severity", "warning", "instance", "n1:9400", "node", "n1", "training_job", "llm"), muted},
		{alert("LockstepGPULost", "severity", "critical", "instance", "n1:9400", "node", "n1", "gpu", "4"), sent},
		{alert("LockstepGPUThrottled", "severity", "warning", "instance", "n2:9400", "node", "n2"), sent},
		{alert("LockstepCommunicationSlow", "severity", "warning", "level", "confirmed", "training_job", "llm"), muted},
		{alert("LockstepCommunicationSlow", "severity", "warning", "level", "confirmed", "training_job", "vit"), sent},
		{alert("LockstepFaultSuspected", "severity", "warning", "level", "suspected", "training_job", "llm"), muted},
		{alert("LockstepFaultSuspected", "severity", "warning", "level", "suspected", "training_job", "bert"), sent},
		// A hang of which nobody knows the node mutes no hardware.
		{alert("LockstepCommunicationHang", "severity", "critical", "level", "confirmed", "training_job", "gpt", "incident", "gpt-1"), sent},
		{alert("LockstepGPUThrottled", "severity", "warning", "instance", "n9:9400"), sent},
		{alert("LockstepMasterDown", "severity", "critical", "training_job", "rl"), sent},
		{alert("LockstepAgentLost", "severity", "warning", "training_job", "rl", "node", "n1"), muted},
		{alert("LockstepAgentLost", "severity", "warning", "training_job", "llm", "node", "n1"), sent},
	}
	var all []map[string]any
	for _, c := range cases {
		all = append(all, c.alert)
	}
	body, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(url+"/api/v2/alerts", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("alerts: %s", resp.Status)
	}
	want := map[string]string{}
	for _, c := range cases {
		want[key(c.alert["labels"].(map[string]string))] = c.state
	}
	var wrong string
	for begin := time.Now(); time.Since(begin) < bound; time.Sleep(50 * time.Millisecond) {
		if wrong = differs(t, url, want); wrong == "" {
			return
		}
	}
	t.Error(wrong)
}

// differs says which alert is not in the state that it should be in.
func differs(t *testing.T, url string, want map[string]string) string {
	resp, err := http.Get(url + "/api/v2/alerts")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got []struct {
		Labels map[string]string
		Status struct{ State string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		return fmt.Sprintf("%d alerts, want %d", len(got), len(want))
	}
	for _, a := range got {
		if k := key(a.Labels); want[k] != a.Status.State {
			return fmt.Sprintf("%s is %s, want %s", k, a.Status.State, want[k])
		}
	}
	return ""
}

func key(labels map[string]string) string { return fmt.Sprint(labels) } // maps print sorted

// alertmanager starts one with this configuration, which it refuses when it is wrong.
func alertmanager(t *testing.T, config string) string {
	t.Helper()
	program := tool(t, local.Alertmanager)
	held, err := ports.Hold("127.0.0.1", 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = held.Close() })
	addr := held.Addrs[0]
	var log bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, "--config.file="+config, "--storage.path="+t.TempDir(), "--web.listen-address="+addr, "--cluster.listen-address=")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	for begin := time.Now(); time.Since(begin) < bound; time.Sleep(20 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("alertmanager: %v\n%s", err, &log)
		default:
		}
		if resp, err := http.Get("http://" + addr + "/-/ready"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return "http://" + addr
			}
		}
	}
	t.Fatalf("alertmanager is not ready after %v", bound)
	return ""
}
