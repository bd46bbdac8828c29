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

	mu    sync.Mutex
	what  string
	quiet time.Time // since when nothing has been said
	shown bool
}

// Start begins a line on standard error when that is a terminal. Stop must follow.
func Start(what string) *Line {
	if !Terminal(os.Stderr) {
		return nil
	}
	return start(os.Stderr, what, Patience, 250*time.Millisecond)
}

func start(out io.Writer, what string, patience, every time.Duration) *Line {
	now := time.Now()
	l := &Line{out: out, began: now, quiet: now, done: make(chan struct{}), ended: make(chan struct{}), what: what}
	go l.run(patience, every)
	return l
}

func (l *Line) run(patience, every time.Duration) {
	defer close(l.ended)
	defer l.Wipe()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-l.done:
			return
		case <-tick.C:
		}
		l.show(patience)
	}
}

func (l *Line) show(patience time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.quiet) < patience {
		return
	}
	fmt.Fprintf(l.out, "\r\x1b[K%s … %d s", l.what, int(time.Since(l.began).Seconds()))
	l.shown = true
}

// Wipe makes room for what the command itself says next: the line comes back when nothing more is said.
func (l *Line) Wipe() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shown {
		fmt.Fprint(l.out, "\r\x1b[K")
	}
	l.shown, l.quiet = false, time.Now()
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
