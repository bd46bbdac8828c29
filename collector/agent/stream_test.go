package agent

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// lines counts what is logged.
type lines struct{ strings.Builder }

func (l *lines) count() int { return strings.Count(l.String(), "\n") }

// A master that is not there is tried often and told of once.
func TestAbsentMasterIsToldOfOnce(t *testing.T) {
	a := newAgent(t)
	a.o.Master = func(string) string { return "127.0.0.1:1" }
	var log lines
	a.log = slog.New(slog.NewTextHandler(&log, nil))
	s := a.newStream("job")
	s.start(context.Background())
	for deadline := time.Now().Add(30 * time.Second); s.reconnect.Load() < 3; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not tried again")
		}
	}
	s.stop()
	if n := log.count(); n != 1 || !strings.Contains(log.String(), "127.0.0.1:1") {
		t.Errorf("%d lines logged:\n%s", n, log.String())
	}
}
