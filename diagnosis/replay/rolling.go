package replay

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// rolling writes segments and the incidents' recordings. A frame goes to the current
// segment and, as it is, to the recording of each incident that is open: these begin with
// copies of segments, so that they are recordings at any moment.
type rolling struct {
	o         *RecorderOptions
	dir       string
	incidents string
	header    Header // of the next segment

	closed  []segment // oldest first
	current segment
	file    *os.File // of current, nil when there is none
	writer  *Writer
	keySize int64 // of the current segment's first pass and header

	pins    []*pin
	resumed bool
	written int64
	failing bool
	again   time.Time // when to try again
	backoff time.Duration
}

type segment struct {
	path        string
	size        int64
	first, last int64 // passes, unix ns
}

// pin is an incident's recording that is being written.
type pin struct {
	id    string
	file  *os.File
	size  int64
	until int64 // last pass wanted, 0 while the incident is open
}

// Of segments: at most so many parts of the bounds each.
const (
	partsOfBytes = 16
	partsOfAge   = 15
)

// scan finds what an earlier recorder has left.
func (w *rolling) scan() error {
	entries, err := os.ReadDir(w.dir) // by name, so by age
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !e.Type().IsRegular() || !strings.HasSuffix(e.Name(), Suffix) {
			continue
		}
		var ms int64
		if _, err := fmt.Sscanf(e.Name(), "%d-", &ms); err != nil {
			continue
		}
		w.closed = append(w.closed, segment{filepath.Join(w.dir, e.Name()), info.Size(), ms * 1e6, info.ModTime().UnixNano()})
	}
	return nil
}

// extent is the rolling recording's size and first pass.
func (w *rolling) extent() (size, oldest int64) {
	size, oldest = w.current.size, w.current.first
	for i := range w.closed {
		size += w.closed[i].size
	}
	if len(w.closed) > 0 {
		oldest = w.closed[0].first
	}
	return size, oldest
}

// pass writes one pass; ok is false when it could not.
func (w *rolling) pass(it *item) (ok bool) {
	now := it.state.now
	if w.failing && time.Now().Before(w.again) {
		return false
	}
	err := w.prepare(now)
	if err == nil {
		for _, m := range it.marks {
			w.mark(m, now)
			if err = w.writer.Mark(m); err != nil {
				break
			}
		}
	}
	if err == nil {
		it.state, err = w.writer.write(it.number, it.state, it.told)
	}
	if err != nil {
		w.fail(err)
		return false
	}
	if w.failing {
		w.failing, w.backoff = false, 0
		w.o.Log.Info("evidence is recorded again")
	}
	if w.current.first == 0 {
		w.current.first, w.keySize = now, w.current.size
	}
	w.current.last = now
	w.finished(now)
	w.prune(now)
	return true
}

// prepare begins a segment when the current one is full or there is none.
func (w *rolling) prepare(now int64) error {
	if !w.resumed {
		w.resumed = true
		w.header.Started = time.Unix(0, now)
		for _, id := range w.o.Open {
			w.pin(id, now, false)
		}
	}
	limit := min(max(w.o.MaxBytes/partsOfBytes, 4*w.keySize), w.o.MaxBytes/3)
	if w.file != nil && w.current.size < limit && now-w.current.first < int64(w.o.MaxAge)/partsOfAge {
		return nil
	}
	w.closeSegment()
	w.header.Segment++
	w.header.Created = time.Unix(0, now)
	path := filepath.Join(w.dir, fmt.Sprintf("%013d-%016x-%06d%s", now/1e6, w.header.Run, w.header.Segment, Suffix))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	w.file, w.current = f, segment{path: path, last: now}
	if w.writer == nil {
		w.writer, err = NewWriter(w, w.header)
		return err
	}
	return w.writer.Segment(w, w.header)
}

// Write gives a frame to the segment and to the incidents' recordings.
func (w *rolling) Write(frame []byte) (int, error) {
	n, err := w.file.Write(frame)
	w.current.size += int64(n)
	w.written += int64(n)
	if err != nil {
		return n, err
	}
	w.pins = slices.DeleteFunc(w.pins, func(p *pin) bool {
		if p.size+int64(len(frame)) > w.o.MaxBytes {
			w.o.Log.Warn("the recording of an incident is as large as one may be: its end is left out", "incident", p.id, "file", p.file.Name())
			p.file.Close()
			return true
		}
		n, err := p.file.Write(frame)
		p.size += int64(n)
		if err != nil {
			w.pinFailed(p.id, err)
			p.file.Close()
			return true
		}
		return false
	})
	return n, nil
}

// fail ends the current segment: what it holds of the last frame is not known.
func (w *rolling) fail(err error) {
	if !w.failing {
		w.o.Log.Error("evidence is not recorded", "err", err, "dir", w.dir)
	}
	w.failing = true
	w.backoff = min(max(2*w.backoff, time.Second), 30*time.Second)
	w.again = time.Now().Add(w.backoff)
	w.closeSegment()
}

func (w *rolling) closeSegment() {
	if w.file == nil {
		return
	}
	w.file.Close()
	w.file = nil
	w.closed = append(w.closed, w.current)
	w.current = segment{}
}

// prune removes the oldest segments that are beyond a bound.
func (w *rolling) prune(now int64) {
	size, _ := w.extent()
	for len(w.closed) > 0 && (size > w.o.MaxBytes || now-w.closed[0].last > int64(w.o.MaxAge)) {
		if err := os.Remove(w.closed[0].path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			w.o.Log.Error("an old segment of the recording of evidence stays", "err", err)
		}
		size -= w.closed[0].size
		w.closed = w.closed[1:]
	}
}

// mark follows an incident's life.
func (w *rolling) mark(m Mark, now int64) {
	switch m.Kind {
	case MarkOpened:
		w.pin(m.Incident, min(m.Onset, now), true)
	case MarkClosed:
		for _, p := range w.pins {
			if p.id == m.Incident {
				p.until = now + int64(w.o.After)
			}
		}
	}
}

// finished closes the recordings that hold what is to be in them.
func (w *rolling) finished(now int64) {
	w.pins = slices.DeleteFunc(w.pins, func(p *pin) bool {
		if p.until == 0 || now < p.until {
			return false
		}
		if err := errors.Join(p.file.Sync(), p.file.Close()); err != nil {
			w.pinFailed(p.id, err)
		}
		return true
	})
}

func (w *rolling) pinFailed(id string, err error) {
	w.o.Log.Error("the recording of an incident is not whole", "incident", id, "err", err)
}

// IncidentFile is the name of an incident's recording in the incidents directory.
func IncidentFile(id string) string {
	name := strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-_.", c) {
			return c
		}
		return '_'
	}, id)
	return strings.TrimLeft(name, ".") + Suffix
}

// pin begins an incident's recording with the segments since a while before its onset,
// or goes on with the one that an earlier recorder began.
func (w *rolling) pin(id string, onset int64, create bool) {
	if len(w.pins) >= maxPins || slices.ContainsFunc(w.pins, func(p *pin) bool { return p.id == id }) {
		return
	}
	path := filepath.Join(w.incidents, IncidentFile(id))
	flags := os.O_WRONLY | os.O_APPEND
	if create {
		w.pruneIncidents()
		flags |= os.O_CREATE | os.O_EXCL
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		if create || !errors.Is(err, fs.ErrNotExist) {
			w.pinFailed(id, err)
		}
		return
	}
	p := &pin{id: id, file: f}
	if info, err := f.Stat(); err == nil {
		p.size = info.Size()
	}
	if create {
		if err := w.copySegments(p, onset-int64(w.o.Before)); err != nil {
			w.pinFailed(id, err)
		}
	}
	w.pins = append(w.pins, p)
}

// maxPins bounds the recordings that are written at a time.
const maxPins = 16

// copySegments writes the segments that have passes after from, the latest ones when not
// all fit into half of what a recording may take.
func (w *rolling) copySegments(p *pin, from int64) error {
	all := append(slices.Clone(w.closed), w.current)
	first, size := len(all)-1, all[len(all)-1].size
	for first > 0 && all[first-1].last >= from && size+all[first-1].size <= w.o.MaxBytes/2 {
		first--
		size += all[first].size
	}
	for _, s := range all[first:] {
		if err := appendFile(p, s.path, s.size); err != nil {
			return err
		}
	}
	return nil
}

func appendFile(p *pin, path string, size int64) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	n, err := io.CopyN(p.file, in, size)
	p.size += n
	return err
}

// pruneIncidents makes room for one more recording.
func (w *rolling) pruneIncidents() {
	entries, err := os.ReadDir(w.incidents)
	if err != nil {
		return // making one fails, too, and says so
	}
	type file struct {
		path string
		size int64
		at   time.Time
	}
	var files []file
	var total int64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !e.Type().IsRegular() || !strings.HasSuffix(e.Name(), Suffix) {
			continue
		}
		files = append(files, file{filepath.Join(w.incidents, e.Name()), info.Size(), info.ModTime()})
		total += info.Size()
	}
	slices.SortFunc(files, func(a, b file) int { return a.at.Compare(b.at) })
	for count := len(files); len(files) > 0 && (count >= w.o.Incidents || total+w.o.MaxBytes > w.o.IncidentBytes); files = files[1:] {
		f := files[0]
		if slices.ContainsFunc(w.pins, func(p *pin) bool { return p.file.Name() == f.path }) {
			continue
		}
		if err := os.Remove(f.path); err != nil {
			w.o.Log.Error("the recording of an old incident stays", "err", err)
			continue
		}
		count--
		total -= f.size
	}
}

// close closes all files.
func (w *rolling) close() {
	w.closeSegment()
	for _, p := range w.pins {
		if err := errors.Join(p.file.Sync(), p.file.Close()); err != nil {
			w.pinFailed(p.id, err)
		}
	}
	w.pins = nil
}
