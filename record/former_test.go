package record_test

import (
	"compress/gzip"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// former unpacks a file that an earlier build has written, with its layout number changed
// when that is not 0.
func former(t *testing.T, name string, layout uint32) string {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if layout != 0 {
		binary.LittleEndian.PutUint32(b[8:], layout)
	}
	path := filepath.Join(t.TempDir(), "former"+record.Suffix)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// What builds before this one have written is read: the layout before this one, and this
// layout from before words were added to it.
func TestFormerLayouts(t *testing.T) {
	for name, layout := range map[string]uint32{"layout3.rec.gz": 3, "layout4-first.rec.gz": 4} {
		t.Run(name, func(t *testing.T) {
			r, err := record.Open(former(t, name, 0))
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			h := r.Header()
			if h.Version != layout || h.Job != "former" || h.Node != "n1" || h.Rank != 2 || h.WorldSize != 4 || h.Attempt != 1 {
				t.Errorf("header %+v", h)
			}
			comms := r.Comms(nil)
			if len(comms) != 1 {
				t.Fatalf("communicators %+v", comms)
			}
			if c := comms[0]; c.ID != 0xabc || c.Name != "dp" || c.Rank != 2 || c.Size != 4 || c.State != record.CommJoined ||
				c.Enqueued != 2 || c.Started != 2 || c.Finished != 1 || c.Coll != record.AllReduce || c.Bytes != 1<<20 || !c.Open() || c.Fault != record.ResultOK {
				t.Errorf("communicator %+v", c)
			}
			conns := r.Conns(nil)
			if len(conns) != 1 {
				t.Fatalf("connections %+v", conns)
			}
			if c := conns[0]; c.Peer != 3 || c.Transport != record.TransportTCP || c.ID != 77 || c.Outstanding() != 3072 || c.Windows != 3 || c.Link != record.LinkNone {
				t.Errorf("connection %+v", c)
			}
			var got []record.Record
			var one [8]record.Record
			for {
				n := r.Next(one[:])
				if n == 0 {
					break
				}
				got = append(got, one[:n]...)
			}
			var step bool
			for _, rec := range got {
				step = step || rec.Kind == record.KindMark && rec.Code == uint8(record.MarkStep) && rec.Value == 41
			}
			if len(got) < 3 || !step || r.Err() != nil {
				t.Errorf("records %+v, %v", got, r.Err())
			}
		})
	}
}

// What is too old or too new is refused with the side to upgrade.
func TestOtherLayouts(t *testing.T) {
	for layout, want := range map[uint32]string{
		record.OldestLayout - 1:  "build the job with a newer library",
		record.LayoutVersion + 1: "upgrade this program (the node's agent",
	} {
		r, err := record.Open(former(t, "layout3.rec.gz", layout))
		if !errors.Is(err, record.ErrVersion) || !strings.Contains(err.Error(), want) {
			t.Errorf("layout %d: %v, %v, want %q", layout, r, err, want)
		}
	}
	if record.LayoutVersion-record.OldestLayout > 1 {
		t.Error("more than one version back is promised to nobody")
	}
}
