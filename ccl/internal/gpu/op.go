package gpu

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// Op is one collective on device memory, already checked by the caller. Count
// follows algo.Call: elements of one rank's share where there are shares.
type Op struct {
	Coll  record.CollKind
	DType record.DType
	RedOp record.RedOp
	Root  int
	Count uint64
	// Stride is the distance of shares in elements where it is not Count: the
	// operation is on a part of each share.
	Stride     uint64
	Send, Recv cuda.Ptr // 0 where this rank has none
	Bytes      uint64   // as recorded
	Stream     uint32   // likewise
	InPlace    bool     // likewise
	Captured   bool     // likewise; set by Run
}

// Way is how an operation is carried out.
type Way uint8

const (
	WayAuto     Way = iota
	WayLL           // kernel, flags in the data, everyone to everyone at once
	WayLL2          // the same in two stages: reduce-scatter, all-gather
	WayLL12         // WayLL by lines that carry 12 bytes instead of 8
	WaySym          // kernel on symmetric windows, loads and stores
	WayBulk         // likewise, by the bulk copy engine of an SM (sm_90)
	WayCopy         // copy engines
	WayPushBulk     // kernel that pushes into peers' staging memory and reduces there, by bulk copies (sm_90)
	numWays
)

var wayNames = [numWays]string{"auto", "ll", "ll2", "ll12", "sym", "bulk", "ce", "pushbulk"}

func (w Way) String() string {
	if int(w) < len(wayNames) {
		return wayNames[w]
	}
	return fmt.Sprintf("way(%d)", w)
}

// ParseWay reads a Way's name; "" is WayAuto.
func ParseWay(s string) (Way, error) {
	for w, name := range wayNames {
		if s == name {
			return Way(w), nil
		}
	}
	if s == "" {
		return WayAuto, nil
	}
	return 0, fmt.Errorf("%q is no way of running a GPU collective, want one of %v", s, wayNames)
}

// lines: data travels with its flags, and no peer needs access to any buffer.
func (w Way) lines() bool { return w >= WayLL && w <= WayLL12 }

// algo and proto are the words of the record for a way.
func (w Way) algo() (record.Algo, record.Proto) {
	switch w {
	case WayLL, WayLL12:
		return record.AlgoDirect, record.ProtoLL
	case WayLL2:
		return record.AlgoDoubling, record.ProtoLL
	case WayCopy:
		return record.AlgoCopyEngine, record.ProtoSimple
	}
	return record.AlgoDirect, record.ProtoSimple
}
