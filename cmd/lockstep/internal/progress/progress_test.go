package progress

import (
	"strings"
	"sync"
	"testing"
	"time"
)

type lines struct {
	mu   sync.Mutex
	text strings.Builder
	seen chan struct{}
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case l.seen <- struct{}{}:
	default:
	}
	return l.text.Write(p)
}

func TestLine(t *testing.T) {
	out := &lines{seen: make(chan struct{}, 1)}
	l := start(out, "asking", 0, time.Millisecond)
	<-out.seen
	l.Set("part %d", 2)
	for !strings.Contains(func() string { out.mu.Lock(); defer out.mu.Unlock(); return out.text.String() }(), "part 2 …") {
		<-out.seen
	}
	l.Stop()
	l.Stop()
	if s := out.text.String(); !strings.Contains(s, "asking …") || !strings.HasSuffix(s, "\r\x1b[K") {
		t.Errorf("wrote %q", s)
	}
}

// A line that is wiped leaves room, and comes back.
func TestWipe(t *testing.T) {
	out := &lines{seen: make(chan struct{}, 1)}
	l := start(out, "asking", 0, time.Millisecond)
	<-out.seen
	l.Wipe()
	for strings.Count(func() string { out.mu.Lock(); defer out.mu.Unlock(); return out.text.String() }(), "asking …") < 3 {
		<-out.seen
	}
	l.Stop()
	if s := out.text.String(); !strings.Contains(s, "s\r\x1b[K\r\x1b[Kasking") {
		t.Errorf("wrote %q", s)
	}
	var nobody *Line
	nobody.Wipe()
}

// What ends soon says nothing, and so does what nobody looks at.
func TestSilence(t *testing.T) {
	out := &lines{seen: make(chan struct{}, 1)}
	l := start(out, "asking", time.Hour, time.Millisecond)
	l.Stop()
	if s := out.text.String(); s != "" {
		t.Errorf("wrote %q", s)
	}
	var nobody *Line
	nobody.Set("x")
	nobody.Stop()
	if Terminal(out) {
		t.Error("a buffer is no terminal")
	}
}
