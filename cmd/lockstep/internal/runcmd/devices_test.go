package runcmd

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDevices(t *testing.T) {
	proc := t.TempDir()
	for _, gpu := range []string{"0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0"} {
		if err := os.Mkdir(filepath.Join(proc, gpu), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, tt := range map[string]struct {
		ranks, spares int
		visible, proc string
		want          string
	}{
		"no spare, nothing moves":  {3, 0, "", proc, ""},
		"one for each slot":        {2, 1, "", proc, "0,1,2"},
		"too few":                  {3, 1, "", proc, ""},
		"none":                     {2, 1, "", filepath.Join(proc, "none"), ""},
		"what the environment has": {1, 1, "GPU-a,3,5", proc, "GPU-a,3,5"},
		"which are too few":        {2, 1, "3,5", proc, ""},
	} {
		c := Cmd{Ranks: tt.ranks, Spares: tt.spares}
		if got := strings.Join(c.devices(tt.visible, tt.proc, slog.New(slog.DiscardHandler)), ","); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
