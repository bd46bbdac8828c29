package ccl_test

import (
	"net"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestDataAddress: without Config.Interface ranks listen for data where the others
// reach them, as for the control plane, and not at 127.0.0.1, which is each host's own.
func TestDataAddress(t *testing.T) {
	const host = "127.0.0.2" // all of 127/8 is this host's
	l, err := net.Listen("tcp", host+":0")
	if err != nil {
		t.Skip(err)
	}
	addr := l.Addr().String()
	l.Close()
	id, err := ccl.NewUniqueID(addr)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := record.Create(record.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()
	ranks(t, 2, func(cfg *ccl.Config) {
		nodes(1)(cfg)
		if cfg.ID = id; cfg.Rank == 1 {
			cfg.Recorder = rec
		}
	}, sum)
	r, err := record.Open(rec.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	conns := r.Conns(nil)
	if len(conns) != 1 || !strings.Contains(conns[0].Name, "->"+host+":") {
		t.Errorf("rank 1's connections are %+v, want one to %s", conns, host)
	}
}
