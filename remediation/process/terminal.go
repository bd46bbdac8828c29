package process

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// drainTime is how long output is read on after a rank has ended: what it
	// forked out of its group may hold the pipe open for good.
	drainTime = 2 * time.Second
	// maxLine of output is kept together; a longer one goes on as further lines.
	maxLine = 64 << 10
)

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
	case <-time.After(2 * drainTime):
	}
}
