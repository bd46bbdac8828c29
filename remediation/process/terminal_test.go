package process

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

// TestLateReader: what a rank wrote before it ended is read, also by who got no CPU until long after that;
// what others write on and on into its pipe is not.
func TestLateReader(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	if _, err := write.WriteString("last words\n"); err != nil {
		t.Fatal(err)
	}
	if err := read.SetReadDeadline(time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	var log, out strings.Builder
	(&terminal{w: &out}).copy(&log, 3, &drained{File: read})
	if log.String() != "last words\n" || out.String() != "[3] last words\n" {
		t.Errorf("log %q, terminal %q", log.String(), out.String())
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for line := []byte(strings.Repeat("x", 1000) + "\n"); ; {
			if _, err := write.Write(line); err != nil {
				return
			}
		}
	}()
	log.Reset()
	(&terminal{w: io.Discard}).copy(&log, 3, &drained{File: read})
	read.Close()
	write.Close()
	<-over
	if n := log.Len(); n > maxLate+maxLine {
		t.Errorf("%d bytes", n)
	}
}
