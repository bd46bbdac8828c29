package ccl

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/executor"
	"github.com/lockstep-ccl/lockstep/ccl/internal/failure"
	"github.com/lockstep-ccl/lockstep/record"
)

// NoColor as a color of Split means that this rank is in no new communicator.
const NoColor = -1

// Split makes a communicator of the ranks that give the same color, ordered by
// key and then by rank; ranks with NoColor get nil. Every rank calls it. It does
// not wait for operations under way, and c remains. The new communicator has c's
// configuration but for its name and what change alters (not ID, Rank or Size).
func (c *Comm) Split(ctx context.Context, color, key int, name string, change ...func(*Config)) (*Comm, error) {
	c.deriving.Lock()
	defer c.deriving.Unlock()
	fail := func(err error) error { return c.deriveError("Split", err) }
	if f := c.x.Over(); f != nil {
		return nil, c.who.Error("Split", 0, f)
	}
	blob := binary.LittleEndian.AppendUint64(nil, uint64(int64(color)))
	blob = binary.LittleEndian.AppendUint64(blob, uint64(int64(key)))
	c.splits++ // also when it fails here: elsewhere it may not
	tag := fmt.Sprintf("split %d", c.splits)
	blobs, err := c.ctl.AllGather(ctx, blob)
	if err != nil {
		return nil, fail(err)
	}
	if color == NoColor {
		return nil, nil
	}
	type member struct{ key, rank int }
	var members []member
	for r, b := range blobs {
		if len(b) != 16 {
			return nil, fail(fmt.Errorf("%w: rank %d called another method", ErrMismatch, r))
		}
		if int(int64(binary.LittleEndian.Uint64(b))) == color {
			members = append(members, member{int(int64(binary.LittleEndian.Uint64(b[8:]))), r})
		}
	}
	slices.SortFunc(members, func(a, b member) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.rank, b.rank))
	})
	ranks := make([]int, len(members))
	for i, m := range members {
		ranks[i] = m.rank
	}
	ctl, err := c.meet(ctx, ranks, tag)
	if err != nil {
		return nil, fail(err)
	}
	child, err := c.child(ctx, ctl, name, change)
	if err != nil {
		return nil, fail(err)
	}
	return child, nil
}

// meet joins the members of a new communicator, of which this rank is one, under a tag.
func (c *Comm) meet(ctx context.Context, ranks []int, tag string) (*bootstrap.Control, error) {
	return c.ctl.Regroup(ctx, ranks, slices.Index(ranks, c.who.Rank), tag)
}

// child makes a communicator on ctl with c's configuration.
func (c *Comm) child(ctx context.Context, ctl *bootstrap.Control, name string, change []func(*Config)) (*Comm, error) {
	cfg := c.cfg
	if cfg.Name = name; name == "" {
		cfg.Name = c.who.Name
	}
	for _, f := range change {
		f(&cfg)
	}
	proc := executor.ProcessOf(cfg.Recorder)
	log, err := executor.NewLog(proc, cfg.Device.Ordinal(), record.CommEntry{
		ID: ctl.ID().Uint64(), Name: cfg.Name, Rank: int32(ctl.Rank()), Size: int32(ctl.Size()), Parent: c.id, State: record.CommJoining,
	}, cfg.logger())
	if err != nil {
		ctl.Close()
		proc.Release()
		return nil, err
	}
	return newComm(ctx, cfg, ctl, proc, log)
}

func (c *Comm) deriveError(op string, err error) error {
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	return c.who.Wrap(op, err)
}

// ShrinkMode says what Shrink does about operations under way.
type ShrinkMode uint8

const (
	// ShrinkDefault finishes them first: the communicator is in order, and
	// ranks are to leave it.
	ShrinkDefault ShrinkMode = iota
	// ShrinkAbort abandons them: ranks have died, or the communicator failed.
	ShrinkAbort
)

// Shrink makes a communicator of all ranks but those in exclude, in the same
// order (it is ncclCommShrink). The remaining ranks call it, with the same
// arguments; the excluded ones do not, and may be dead. After ShrinkAbort c is
// over on the calling ranks; it must still be closed, as always.
func (c *Comm) Shrink(ctx context.Context, exclude []int, mode ShrinkMode, name string) (*Comm, error) {
	c.deriving.Lock()
	defer c.deriving.Unlock()
	fail := func(err error) error { return c.deriveError("Shrink", err) }
	if c.x.Closing() {
		return nil, fail(ErrClosed)
	}
	out := make([]bool, c.size)
	for _, r := range exclude {
		if r < 0 || r >= c.size || r == c.who.Rank {
			return nil, fail(fmt.Errorf("%w: exclude rank %d of %d on rank %d", ErrInvalid, r, c.size, c.who.Rank))
		}
		out[r] = true
	}
	if mode == ShrinkAbort {
		c.x.Fail(&failure.Failure{Peer: -1, Err: fmt.Errorf("%w: shrinking to the survivors", ErrAborted)}, false)
		// The executor lets go of the buffers before the caller goes on.
		if err := c.x.Drive(ctx, c.x.Last()); err != nil && c.x.Finished() < c.x.Last() {
			return nil, fail(err)
		}
	} else if err := c.x.Drive(ctx, c.x.Last()); err != nil {
		return nil, fail(err)
	} else if f := c.x.Over(); f != nil {
		return nil, fail(c.who.Error("Shrink", 0, &failure.Failure{Peer: f.Peer, Err: fmt.Errorf("%w (use ShrinkAbort)", f.Err)}))
	}
	var ranks []int
	for r := range c.size {
		if !out[r] {
			ranks = append(ranks, r)
		}
	}
	if c.shrinks == nil {
		c.shrinks = map[string]int{}
	}
	// A try that some ranks did not join does not count, so the next one may still match
	// theirs.
	list := fmt.Sprint(ranks)
	ctl, err := c.meet(ctx, ranks, fmt.Sprintf("shrink %d", c.shrinks[list]+1))
	if err != nil {
		return nil, fail(err)
	}
	c.shrinks[list]++
	child, err := c.child(ctx, ctl, name, nil)
	if err != nil {
		return nil, fail(err)
	}
	return child, nil
}

// GrowID makes the id for a grown communicator; rank 0 calls it and sends the
// id to the newcomers out of band (it is ncclCommGetUniqueId).
func (c *Comm) GrowID() (UniqueID, error) {
	if c.who.Rank != 0 {
		return UniqueID{}, c.deriveError("GrowID", fmt.Errorf("%w: rank 0 makes the id", ErrInvalid))
	}
	l := c.ctl.Listener()
	defer l.Close()
	return UniqueID{l.NewID()}, nil
}

// Grow makes a communicator of size ranks: all of c's, which keep their numbers,
// and newcomers, which call Init with the id, the size, c's secret and the
// numbers from c.Size() up (it is ncclCommGrow). Every rank of c calls it; rank 0
// passes the id, the others may pass the zero UniqueID. It finishes the operations
// under way first; c remains.
func (c *Comm) Grow(ctx context.Context, id UniqueID, size int, name string) (*Comm, error) {
	c.deriving.Lock()
	defer c.deriving.Unlock()
	fail := func(err error) error { return c.deriveError("Grow", err) }
	if size <= c.size {
		return nil, fail(fmt.Errorf("%w: grow from %d to %d ranks", ErrInvalid, c.size, size))
	}
	if err := c.x.Drive(ctx, c.x.Last()); err != nil {
		return nil, fail(err)
	}
	b, err := c.ctl.Broadcast(ctx, 0, []byte(id.String()))
	if err != nil {
		return nil, fail(err)
	}
	if id, err = ParseUniqueID(string(b)); err != nil {
		return nil, fail(err)
	}
	cfg := bootstrap.Config{ID: id.id, Rank: c.who.Rank, Size: size, Secret: c.cfg.Secret, Host: c.cfg.Interface, Info: c.ctl.Members()[c.who.Rank].Info, Outage: c.cfg.OutageTimeout}
	if c.who.Rank == 0 {
		cfg.Listener = c.ctl.Listener()
	}
	ctl, err := bootstrap.Join(ctx, cfg)
	if err != nil {
		return nil, fail(err)
	}
	child, err := c.child(ctx, ctl, name, nil)
	if err != nil {
		return nil, fail(err)
	}
	return child, nil
}
