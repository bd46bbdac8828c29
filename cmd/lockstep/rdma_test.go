package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestRealRDMAScripts runs what needs RDMA devices and breaks them.
func TestRealRDMAScripts(t *testing.T) {
	if os.Getenv("LOCKSTEP_RDMAVM") == "" {
		t.Skip("not in the virtual machine with RDMA devices: make test-rdma")
	}
	testscript.Run(t, scripts("testdata/rdma"))
}
