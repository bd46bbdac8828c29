package rdma

import (
	"log/slog"
	"os"
	"os/exec"
	"testing"
	"time"
)

// Soft-RoCE itself: its counters by its own names, and a flap of ten
// milliseconds between two probes.
func TestRealSoftRoCE(t *testing.T) {
	if os.Getenv("LOCKSTEP_RDMAVM") == "" {
		t.Skip("only in the virtual machine of deploy/rdmavm (make test-rdma)")
	}
	log := &logs{}
	r := &rig{t: t, log: log, Source: New(Options{Period: time.Hour, Log: slog.New(log)})}
	r.v.Now = 1e9
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := r.probe(); err != nil {
		t.Fatal(err)
	}
	p := r.port("rxa0")
	if !p.Up || p.State != "ACTIVE" || p.Layer != "Ethernet" || p.Rate == nil || p.BusID != "" || len(p.Links) != 1 || p.Links[0].NetDev != "a0" || !p.Links[0].Up || len(p.Failed) != 0 {
		t.Errorf("%+v", p)
	}
	if len(p.Retransmissions) < 5 || len(p.Errors) < 2 || p.TransmittedPackets == nil || p.ReceivedPackets == nil {
		t.Errorf("counters: %+v", p)
	}

	ip(t, "link set b0 down")
	time.Sleep(10 * time.Millisecond)
	ip(t, "link set b0 up")
	defer func() {
		if out, err := exec.Command("rails", "up", "0").CombinedOutput(); err != nil {
			t.Errorf("rails up 0: %v\n%s", err, out)
		}
	}()
	r.until(t, func() bool { return r.port("rxa0").Flaps > 0 })
	r.until(t, func() bool { return r.port("rxb0").Flaps > 0 })
	if p := r.port("rxa1"); p.Flaps != 0 || !p.Up {
		t.Errorf("the other rail: %+v", p)
	}
}
