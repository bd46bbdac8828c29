package collector

import (
	"encoding/hex"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// The ids are in other people's trace stores: these values never change.
func TestIDsAreStable(t *testing.T) {
	for _, c := range []struct {
		job         string
		comm        uint64
		kind        record.CollKind
		seq         uint64
		rank        int32
		trace, span string
	}{
		{"demo", 0x1234, record.AllReduce, 1, 0, "4adb8713ab5e221544f24a0094eebe97", "820786776877c7cf"},
		{"demo", 0x1234, record.AllReduce, 2, 1, "5d61035fd82055a706d9dde8e47c9fa9", "d9365a16d36753f1"},
		{"", 0, record.CollNone, 0, -1, "2ea129e6a74b30cd33fe8bd4f9c57863", "b812a9bdbc5d802d"},
	} {
		tr := TraceID(c.job, c.comm, c.kind, c.seq)
		sp := SpanID(tr, c.rank)
		if got := hex.EncodeToString(tr[:]); got != c.trace {
			t.Errorf("TraceID(%q, %#x, %v, %d) = %s, want %s", c.job, c.comm, c.kind, c.seq, got, c.trace)
		}
		if got := hex.EncodeToString(sp[:]); got != c.span {
			t.Errorf("SpanID(%s, %d) = %s, want %s", c.trace, c.rank, got, c.span)
		}
	}
}

func TestIDsAreDistinct(t *testing.T) {
	traces := map[[16]byte]bool{}
	spans := map[[8]byte]bool{}
	for _, job := range []string{"a", "b", "ab", "a\x00"} {
		for comm := range uint64(4) {
			for kind := record.AllReduce; kind <= record.Group; kind++ {
				for seq := range uint64(64) {
					tr := TraceID(job, comm, kind, seq)
					if traces[tr] {
						t.Fatalf("trace id of %q %d %v %d seen before", job, comm, kind, seq)
					}
					traces[tr] = true
					for rank := range int32(4) {
						sp := SpanID(tr, rank)
						if spans[sp] {
							t.Fatalf("span id of %q %d %v %d rank %d seen before", job, comm, kind, seq, rank)
						}
						spans[sp] = true
					}
				}
			}
		}
	}
}
