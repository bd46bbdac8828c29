package bootstrap

import (
	"context"
	"fmt"
)

// Regroup joins some of c's members into a new communicator. members[i] is the rank in c of
// new rank i, and newRank is the caller's. Every listed member calls it with the same list
// and tag. A list may use a tag once, since both determine the new communicator's token.
//
// Regroup uses no session of c, so it also works when c has lost ranks or was aborted. It
// fails as Join does, with ErrRank if the list is wrong, and with a *LostError if a listed
// member's process is gone. That error's Rank is the new rank.
func (c *Control) Regroup(ctx context.Context, members []int, newRank int, tag string) (*Control, error) {
	g, err := c.regroup(ctx, members, newRank, tag)
	if err != nil {
		return nil, fmt.Errorf("rank %d: regroup %q of %d ranks: %w", newRank, tag, len(members), err)
	}
	return g, nil
}

func (c *Control) regroup(ctx context.Context, members []int, newRank int, tag string) (*Control, error) {
	if newRank < 0 || newRank >= len(members) || members[newRank] != c.rank {
		return nil, fmt.Errorf("%w: new rank %d is not this rank %d", ErrRank, newRank, c.rank)
	}
	addrs := make([]string, len(members))
	for i, m := range members {
		if m < 0 || m >= c.size {
			return nil, fmt.Errorf("%w: member %d, size is %d", ErrRank, m, c.size)
		}
		addrs[i] = c.members[m].Addr
	}
	g := newControl(Config{
		ID:   ID{Addr: addrs[0], Token: c.id.derive(tag, members)},
		Rank: newRank, Size: len(members), Secret: c.secret, Info: c.members[c.rank].Info, Outage: c.bound(),
	})
	if newRank == 0 {
		return g, g.host(ctx, c.listener, addrs)
	}
	return g, g.joinHub(ctx, addrs[0], c.listener, "", true)
}
