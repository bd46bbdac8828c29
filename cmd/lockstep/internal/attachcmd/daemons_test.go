package attachcmd

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestDaemonThatEnds starts one that ends at once, as a master without its certificate does: nobody waits for it any
// longer, and its last words are told.
func TestDaemonThatEnds(t *testing.T) {
	dir := t.TempDir()
	exe := filepath.Join(dir, "agent")
	if err := os.WriteFile(exe, []byte("#!/bin/sh\necho no certificate of $1 >&2\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	c := Cmd{StateDir: filepath.Join(dir, "state"), RuntimeDir: filepath.Join(dir, "run")}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	_, started, err := c.daemon(ctx, exe, "agent", []string{"node0"})
	if !started || err == nil || !strings.Contains(err.Error(), "has ended; it says: no certificate of node0") {
		t.Errorf("started %v, %v", started, err)
	}
}
