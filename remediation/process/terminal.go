package process

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

const (
	// drainTime is how long output is read on after a rank has ended: what it
	// forked out of its group may hold the pipe open for good.
	drainTime = 2 * time.Second
	// maxLate is more than a pipe holds, and lateTime long enough to read what is there.
	maxLate  = 1 << 20
	lateTime = 50 * time.Millisecond
	// flushTime is how long the end waits for a terminal that takes nothing.
	flushTime = 10 * time.Second
	// maxLine of output is kept together; a longer one goes on as further lines.
	maxLine = 64 << 10
)

// drained is a pipe that is read to its deadline, and then for what is in it by then: who reads may
// have got no CPU in time.
type drained struct {
	*os.File
	over bool // the deadline is
	late int  // bytes read since
}

func (d *drained) Read(b []byte) (int, error) {
	if d.late >= maxLate { // somebody writes on and on
		return 0, os.ErrDeadlineExceeded
	}
	n, err := d.File.Read(b)
	if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		d.over = true
		if err := d.SetReadDeadline(time.Now().Add(lateTime)); err != nil {
			return 0, err
		}
		n, err = d.File.Read(b)
	}
	if d.over {
		d.late += n
	}
	return n, err
}

// terminal is where the lines of all ranks meet.
type terminal struct {
	lines sync.WaitGroup // one copier a rank process

	mu sync.Mutex
	w  io.Writer
}

// copy copies r to the log as it is, and to the terminal line by line, until r ends.
func (t *terminal) copy(log io.Writer, rank int, r io.Reader) {
	b := bufio.NewReaderSize(r, maxLine)
	for {
		line, err := b.ReadSlice('\n')
		if len(line) > 0 {
			_, _ = log.Write(line) // a full disk must not stop the rank
			t.print(rank, line)
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

func (t *terminal) print(rank int, line []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	end := ""
	if line[len(line)-1] != '\n' {
		end = "\n"
	}
	fmt.Fprintf(t.w, "[%d] %s%s", rank, line, end)
}

// flush waits until the output of ended ranks is out, but not for a terminal
// that takes none.
func (t *terminal) flush() {
	out := make(chan struct{})
	go func() {
		t.lines.Wait()
		close(out)
	}()
	select {
	case <-out:
	case <-time.After(flushTime):
	}
}
