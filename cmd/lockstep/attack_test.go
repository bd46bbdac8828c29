package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// TestAttackers plays attackers against real processes with their default flags, one in
// each position of docs/design/trust.md. All the while a client that is honest asks the
// master, and the job trains: nothing may be restarted, excluded, blinded, held up or
// exhausted, and each refusal is counted.
func TestAttackers(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes, with the race detector's weight: CI runs it without")
	}
	w := newTown(t)
	for _, a := range []struct {
		name   string
		attack func(*testing.T, *town)
	}{
		{"HostOnTheNetwork", hostOnTheNetwork},
		{"OtherCertificates", otherCertificates},
		{"AgentOfAnotherNode", agentOfAnotherNode},
		{"StolenCertificate", stolenCertificate},
		{"HostileMessages", hostileMessages},
		{"Floods", floods},
		{"SlowlyAndHalf", slowlyAndHalf},
		{"AnotherUserOfTheHost", anotherUser},
		{"WhoCanPostAlerts", whoCanPostAlerts},
		{"TwoOfEach", twoOfEach},
		{"RendezvousFlood", rendezvousFlood},
		{"HostileRecorders", hostileRecorders},
		{"HostsOfAJob", hostsOfAJob},
	} {
		t.Run(a.name, func(t *testing.T) {
			watch := w.watch()
			a.attack(t, w)
			watch.unharmed(t)
		})
	}
	t.Run("DamagedState", func(t *testing.T) { damagedState(t, w) })
}

// grows checks that refusals were counted.
func grows(t *testing.T, addr string, m *names.Metric, before float64, labels ...string) {
	t.Helper()
	eventually(t, m.Name+" counted", func() error {
		if now := metric(t, addr, m, labels...); now <= before {
			return fmt.Errorf("%v, before %v", now, before)
		}
		return nil
	})
}

// anotherUser is on the same host, without certificates.
func anotherUser(t *testing.T, w *town) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	// /status is for this host's loopback, what it tells is no key; files and sockets are closed.
	for _, path := range []string{w.path("token"), w.path("pki", "master.key"), w.path("job", "control.sock"), w.path("journal", "r.db"), w.path("state", "incidents.json")} {
		out, err := asNobody("cat", path).CombinedOutput()
		if err == nil {
			t.Errorf("another user reads %s: %.40q", path, out)
		}
	}
	if out, err := asNobody("sh", "-c", "kill -STOP "+fmt.Sprint(w.parts["master"].Process.Pid)).CombinedOutput(); err == nil {
		t.Errorf("another user stops the master: %s", out)
	}
	// A job's runtime directory that another user has made before is no reason for the job not to run.
	rt := filepath.Join(t.TempDir(), "rt")
	if err := errors.Join(os.Mkdir(rt, 0o777), os.Chmod(rt, 0o777), os.Chown(rt, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*bound)
	defer cancel()
	cmd := exec.CommandContext(ctx, "lockstep", "run", "--job", "squatted", "--ranks", "2", "--dir", w.path("squatted"), "--runtime-dir", rt, "--quiet", "--",
		"lockstep", "train", "--dp", "2", "--tp", "1", "--pp", "1", "--dir", w.path("squatted-train"), "--steps", "3", "--pace", "1ms")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("a job whose runtime directory is squatted: %v\n%s", err, out)
	}
}

func (w *town) post(t *testing.T, path, token, body string) int {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+w.rem+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := (&http.Client{Timeout: bound}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

func whoCanPostAlerts(t *testing.T, w *town) {
	alert := func(incident string, starts time.Time, labels ...string) string {
		l := map[string]string{
			"alertname": "LockstepNoncommunicationHang", names.LabelJob: townJob, names.LabelIncident: incident, names.LabelClass: names.ClassNoncommunicationHang,
			names.LabelLevel: names.LevelConfirmed, names.LabelCulprit: "rank 2", names.LabelRank: "2", names.LabelAttempt: "0",
		}
		for i := 0; i < len(labels); i += 2 {
			l[labels[i]] = labels[i+1]
		}
		b, err := json.Marshal(map[string]any{"version": "4", "alerts": []any{map[string]any{"status": "firing", "startsAt": starts, "fingerprint": incident + starts.String(), "labels": l}}})
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	unauthorized := metric(t, w.rem, names.Webhooks, "unauthorized")
	unknown := metric(t, w.rem, names.Disbelieved, "unknown_incident")
	now := time.Now()
	if code := w.post(t, "/webhook", "", alert("x", now)); code != http.StatusUnauthorized {
		t.Errorf("without the token: %d", code)
	}
	grows(t, w.rem, names.Webhooks, unauthorized, "unauthorized")
	sent := 0
	for _, body := range []string{
		alert("victim-1-1", now), alert("victim-1-1", now.Add(-time.Minute)), alert("victim-1-2", now, names.LabelAttempt, "7"),
		alert("victim-1-3", now, names.LabelJob, "other"), alert("x\n", now), alert("victim-1-4", now.Add(-24*time.Hour)),
	} {
		for range 3 { // and replayed
			if code := w.post(t, "/webhook", w.token, body); code/100 == 5 {
				t.Errorf("%d for %s", code, body)
			}
			sent++
		}
	}
	grows(t, w.rem, names.Disbelieved, unknown, "unknown_incident")
	for _, scope := range []string{"total", "units", "job:" + townJob} {
		if code := w.post(t, "/api/v1/breakers/close?scope="+scope, w.token, ""); code != http.StatusForbidden {
			t.Errorf("Alertmanager's token closes breakers: %d", code)
		}
	}
	if code := w.post(t, "/webhook", w.operatorToken, alert("x", now)); code != http.StatusForbidden {
		t.Errorf("the operator's token is Alertmanager's: %d", code)
	}
	for _, body := range []string{"", "{", `{"version":"4"}`, strings.Repeat("[", 1<<20), strings.Repeat(" ", 2<<20)} {
		if code := w.post(t, "/webhook", w.token, body); code != http.StatusBadRequest {
			t.Errorf("%d for %.20q", code, body)
		}
	}
}

// twoOfEach starts a second master and remediator on the state of the first.
func twoOfEach(t *testing.T, w *town) {
	for _, name := range []string{"master", "remediator"} {
		args := append([]string(nil), w.parts[name].args...)
		for i := range args[:len(args)-1] {
			if args[i] == "--listen" || args[i] == "--web.listen-address" {
				args[i+1] = "127.0.0.1:0"
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*bound)
		out, err := exec.CommandContext(ctx, "lockstep", args...).CombinedOutput()
		cancel()
		if err == nil || !strings.Contains(string(out), w.dir) || !strings.Contains(string(out), "end that one first") {
			t.Errorf("a second %s: %v\n%s", name, err, out)
		}
	}
}

// damagedState overwrites what master and remediator have on disk, while they are down.
func damagedState(t *testing.T, w *town) {
	rng := rand.New(rand.NewPCG(3, 4))
	spoil := func(path string) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range b[:min(len(b), 1<<16)] {
			b[i] = byte(rng.Uint32())
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "recorded", func() error {
		if list, _ := filepath.Glob(w.path("state", "recording", "*")); len(list) == 0 {
			return errors.New("no recording")
		}
		_, err := os.Stat(w.path("state", "incidents.json"))
		return err
	})
	w.again(t, "master", func() {
		list, _ := filepath.Glob(w.path("state", "recording", "*"))
		for _, path := range append(list, w.path("state", "incidents.json")) {
			spoil(path)
		}
	})
	w.healthy(t)
	if _, err := os.Stat(w.path("state", "incidents.json.damaged")); err != nil {
		t.Errorf("the damaged file is not set aside: %v", err)
	}
	journal := w.path("journal", "r.db")
	w.again(t, "remediator", func() { spoil(journal) })
	p := w.parts["remediator"]
	select {
	case <-p.done:
	case <-time.After(2 * bound):
		t.Fatal("the remediator runs on a damaged journal")
	}
	log, err := os.ReadFile(p.log)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(log, []byte(journal+": ")) || !bytes.Contains(log, []byte("move it away")) || bytes.Contains(log, []byte("goroutine ")) {
		t.Errorf("the remediator's word: %s", log[max(0, len(log)-1000):])
	}
	if err := os.Rename(journal, journal+".damaged"); err != nil {
		t.Fatal(err)
	}
	w.run(t, "remediator", p.args...)
	eventually(t, "ready again", func() error { return w.get(w.rem+"/-/ready", "", nil) })
	s, err := w.control.Status(context.Background())
	if err != nil || s.Attempt != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

// asNobody is a command of another user.
func asNobody(name string, args ...string) *exec.Cmd {
	return exec.Command("setpriv", append([]string{"--reuid", "65534", "--regid", "65534", "--clear-groups", name}, args...)...)
}
