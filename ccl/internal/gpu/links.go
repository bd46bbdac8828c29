package gpu

import (
	"context"
	"fmt"

	"github.com/lockstep-ccl/lockstep/record"
)

// links finds out whether NVLink joins all GPUs of the communicator, as chains want: of lines of
// 128 bytes nothing else is known to bring all bytes at a time. Each rank asks its driver, and all
// go by what the first one says that lacks a link. buses is where on PCIe the ranks' GPUs are.
func (c *Comm) links(ctx context.Context, buses []string) error {
	if c.size == 1 {
		return nil
	}
	answers, err := c.cfg.Exchange(ctx, []byte(c.lacksLink(buses)))
	if err != nil {
		return err
	}
	for _, why := range answers {
		if len(why) > 0 {
			c.unlinked = string(why)
			break
		}
	}
	return nil
}

// lacksLink says to which other GPU NVLink does not join this rank's, "" where it joins all. What
// cannot be known counts as PCIe.
func (c *Comm) lacksLink(buses []string) string {
	for r, bus := range buses {
		if r == c.rank {
			continue
		}
		pair := fmt.Sprintf("GPU %s of rank %d and GPU %s of rank %d", c.dev.PCIBus, c.rank, bus, r)
		if bus == c.dev.PCIBus {
			return pair + " are one"
		}
		switch linked, err := c.dev.Linked(bus); {
		case err != nil:
			return fmt.Sprintf("whether NVLink joins %s is not known: %v", pair, err)
		case !linked:
			return "NVLink does not join " + pair
		}
	}
	return ""
}

// Refused is why no collective takes the algorithm that was asked for, "" where some may.
func (c *Comm) Refused() string {
	f := c.cfg.Force
	if f == record.AlgoNone || c.size == 1 {
		return ""
	}
	for coll := range collectives {
		if c.has(coll, f) {
			return ""
		}
	}
	switch {
	case f == record.AlgoChain:
		return c.unlinked
	case f == record.AlgoCopyEngine && c.shared:
		return "ranks share a GPU, where copy engines could hang"
	}
	return fmt.Sprintf("no collective has it among %d GPUs of compute capability %d.x", c.size, c.major)
}
