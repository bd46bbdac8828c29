// Package progress says on a terminal what a command is at, once that takes longer
// than a reader waits without wondering.
//
// In flow words for what goes on; out flows one line that is written over and wiped
// in the end. Where nobody looks (no terminal) it writes nothing.
package progress

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Patience is how long a command may say nothing.
const Patience = 2 * time.Second

// A Line is what a command is at. It is safe for concurrent use, and a nil one says nothing.
type Line struct {
	out   io.Writer
	began time.Time
	done  chan struct{}
	ended chan struct{}

	mu   sync.Mutex
	what string
}

// Start begins a line on standard error when that is a terminal. Stop must follow.
func Start(what string) *Line {
	if !Terminal(os.Stderr) {
		return nil
	}
	return start(os.Stderr, what, Patience, 250*time.Millisecond)
}

func start(out io.Writer, what string, patience, every time.Duration) *Line {
	l := &Line{out: out, began: time.Now(), done: make(chan struct{}), ended: make(chan struct{}), what: what}
	go l.run(patience, every)
	return l
}

func (l *Line) run(patience, every time.Duration) {
	defer close(l.ended)
	select {
	case <-l.done:
		return
	case <-time.After(patience):
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		l.mu.Lock()
		what := l.what
		l.mu.Unlock()
		fmt.Fprintf(l.out, "\r\x1b[K%s … %d s", what, int(time.Since(l.began).Seconds()))
		select {
		case <-l.done:
			fmt.Fprint(l.out, "\r\x1b[K")
			return
		case <-tick.C:
		}
	}
}

// Set says what goes on now.
func (l *Line) Set(format string, args ...any) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.what = fmt.Sprintf(format, args...)
}

// Stop wipes the line; nothing is written after it. It may be called again.
func (l *Line) Stop() {
	if l == nil {
		return
	}
	l.mu.Lock()
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	l.mu.Unlock()
	<-l.ended
}

// Terminal reports whether w is one.
func Terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	fi, err := f.Stat()
	return err == nil && fi.Mode()&os.ModeCharDevice != 0
}
