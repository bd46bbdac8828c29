package rdma

import (
	"errors"
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
)

// ErrNoPath means that no path between two ranks works any more; it is in a *PathError.
var ErrNoPath = errors.New("no path left")

var errNoOffer = errors.New("the peer has not offered any")

// PathError names the ports of both ranks between which no path works.
type PathError struct {
	Paths []Path
	Err   error // what was wrong last
}

func (e *PathError) Error() string {
	names := make([]string, len(e.Paths))
	for i := range e.Paths {
		names[i] = e.Paths[i].String()
	}
	return fmt.Sprintf("%v over %s: %v", ErrNoPath, strings.Join(names, " or "), e.Err)
}

// Is makes the error ErrNoPath.
func (e *PathError) Is(target error) bool { return target == ErrNoPath }

func (e *PathError) Unwrap() error { return e.Err }

// Path is a port of each end.
type Path struct{ Own, Peer nic.Port }

// String is "mlx5_0/1->mlx5_2/1".
func (p *Path) String() string {
	return fmt.Sprintf("%s/%d->%s/%d", p.Own.Device, p.Own.Num, p.Peer.Device, p.Peer.Num)
}

// State is what became of a path of a lane.
type State uint8

// Watcher hears what becomes of a connection's paths. It is called with the
// worker's lock held, from any goroutine.
type Watcher interface {
	// Posted tells of a write of n bytes over a path, total in all.
	Posted(lane, path, n int, total uint64)
	// Completed tells that the peer's NIC has total bytes.
	Completed(lane, path int, total uint64)
	// Path tells a path's state; qp and peer are the numbers of its queue pair and of the
	// other end's.
	Path(lane, path int, s State, qp, peer uint32)
	// Received tells of n bytes that arrived.
	Received(lane, path, n int)
	// Switched tells that a path carries what another one no longer does, and how
	// much was sent again over it.
	Switched(lane, path int, messages, bytes uint64)
}
