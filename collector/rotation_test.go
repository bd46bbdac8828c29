package collector_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestRotationUnderLoad replaces all certificates every second while reports flow. They
// live for three: each stream ends with its own, and the agent is back at once with the
// next. Nobody is started anew, and nothing is taken for a fault.
func TestRotationUnderLoad(t *testing.T) {
	certs := wiretest.NewAuthority(t)
	certs.Life = 3 * time.Second
	masterTLS, agentTLS := certs.Master("job"), certs.Agent("node")
	dir := t.TempDir()
	r := newRanks(t, dir, 4, 0)
	defer r.steps()()
	m, _ := startMaster(t, master.Options{TLS: &masterTLS})
	a, _ := startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String()), TLS: &agentTLS})
	seen := func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 4 }
	eventually(t, "all ranks run", seen)

	gap, away, rotated := time.Duration(0), time.Time{}, time.Now()
	for begin := time.Now(); time.Since(begin) < 8*time.Second; time.Sleep(5 * time.Millisecond) {
		if time.Since(rotated) > time.Second {
			rotated = time.Now()
			certs.Master("job")
			certs.Agent("node")
		}
		s := a.Snapshot()
		switch connected := len(s.Master) == 1 && s.Master[0].Connected; {
		case connected && !away.IsZero():
			gap, away = max(gap, time.Since(away)), time.Time{}
		case !connected && away.IsZero():
			away = time.Now()
		}
	}
	certs.Life = time.Hour // the last ones must do while the rest is looked at
	certs.Master("job")
	certs.Agent("node")
	eventually(t, "connected, all ranks seen", func() bool { return a.Snapshot().Master[0].Connected && seen() })
	snap, stream := m.Snapshot(), a.Snapshot().Master[0]
	if stream.Reconnect == 0 {
		t.Error("streams outlive their certificates")
	}
	for _, i := range snap.Incidents {
		if !i.Confirmed.IsZero() {
			t.Errorf("an incident: %+v", i)
		}
	}
	// A reconnect takes 50 to 150 ms; the bound is for machines that do ten other things.
	if gap > 10*time.Second {
		t.Errorf("without a stream for %v", gap)
	}
	if snap.Attempt != 0 || snap.WorldSize != 4 || snap.Denied != 0 {
		t.Errorf("%+v", snap)
	}
	t.Logf("%d reports, %d times connected again, never without a stream for longer than %v", stream.Reports, stream.Reconnect, gap.Round(time.Millisecond))
}

// A pair of files that do not fit is told of, and what could be read last serves.
func TestUnreadableCertificatesAreTold(t *testing.T) {
	certs := wiretest.NewAuthority(t)
	masterTLS, agentTLS := certs.Master("job"), certs.Agent("node")
	dir := t.TempDir()
	newRanks(t, dir, 1, 0)
	m, _ := startMaster(t, master.Options{TLS: &masterTLS})
	good, err := os.ReadFile(masterTLS.CertFile)
	if err != nil {
		t.Fatal(err)
	}
	own := func() wire.Certificate {
		for _, c := range wire.Certificates() {
			if c.File == masterTLS.CertFile {
				return c
			}
		}
		return wire.Certificate{Err: fmt.Errorf("%s is not among %+v", masterTLS.CertFile, wire.Certificates())}
	}
	if c := own(); c.Err != nil || time.Until(c.Expires) < 30*time.Minute {
		t.Errorf("%+v", c)
	}
	if err := os.WriteFile(masterTLS.CertFile, []byte("half a certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String()), TLS: &agentTLS})
	eventually(t, "let in by what could be read last", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 1 })
	if c := own(); c.Err == nil || time.Until(c.Expires) < 30*time.Minute {
		t.Errorf("not told: %+v", c)
	}
	if err := os.WriteFile(masterTLS.CertFile, good, 0o600); err != nil {
		t.Fatal(err)
	}
	second, _ := startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String()), TLS: &agentTLS})
	eventually(t, "a handshake", func() bool { s := second.Snapshot(); return len(s.Master) == 1 && s.Master[0].Reconnect > 0 })
	if c := own(); c.Err != nil {
		t.Errorf("%+v", c)
	}
}
