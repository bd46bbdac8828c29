package top

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// On a terminal it draws again and again on a screen of its own, until it is interrupted,
// and leaves the terminal as it was.
func TestTerminal(t *testing.T) {
	t.Setenv("TERM", "xterm")
	m, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo terminals here: %v", err)
	}
	defer m.Close()
	n, err := unix.IoctlGetInt(int(m.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(m.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Skipf("no pseudo terminals here: %v", err)
	}
	s, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo terminals here: %v", err)
	}
	defer s.Close()
	if err := unix.IoctlSetWinsize(int(s.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 10, Col: 60}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- (&Cmd{RuntimeDir: ranks(t, 3, "llm"), Sort: "state", Every: 100 * time.Millisecond}).Run(ctx, s)
	}()
	const restored = "\x1b[?25h\x1b[?1049l"
	text := make(chan string, 1)
	go func() {
		var all strings.Builder
		buf := make([]byte, 4096)
		for {
			k, err := m.Read(buf)
			all.Write(buf[:k])
			if strings.Count(all.String(), "AllReduce #8") >= 3 {
				cancel()
			}
			// The other end stays open: what a pseudo terminal still has under way when that is closed may be lost.
			if err != nil || all.Len() > 1<<20 || strings.HasSuffix(all.String(), restored) {
				text <- all.String()
				return
			}
		}
	}()
	select {
	case all := <-text:
		if err := <-ended; err != nil && err != io.EOF {
			t.Error(err)
		}
		if !strings.HasPrefix(all, "\x1b[?1049h") || !strings.HasSuffix(all, restored) {
			t.Errorf("the terminal is not left as it was: %q", all[max(0, len(all)-100):])
		}
		if n := strings.Count(all, "AllReduce #8"); n < 3 {
			t.Errorf("drawn %d times", n)
		}
	case <-time.After(time.Minute):
		t.Fatal("it does not draw, or does not end")
	}
}
