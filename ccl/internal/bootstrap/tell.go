package bootstrap

const (
	maxStatement = 256  // bytes
	maxTold      = 1024 // statements that Told's reader has not taken
)

// Statement is a member's message to rank 0.
type Statement struct {
	Rank int // of the sender
	Blob []byte
}

// Tell sends rank 0 a statement of at most 256 bytes, such as the signature of the collective
// that this rank is stuck in. It does not block. It drops a statement that is too long or that
// a queue has no room for.
func (c *Control) Tell(blob []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != stateJoined || len(blob) > maxStatement {
		return
	}
	blob = append([]byte(nil), blob...)
	if c.rank == 0 {
		c.note(Statement{0, blob})
	} else if p := c.peers[0]; p != nil && p.unacknowledged() < maxQueue/2 { // a full queue ends the session
		p.send(seal(appendBytes(frame(frameTell), blob)))
	}
}

// Told delivers the members' statements on rank 0, and none on other ranks. Close and Leave
// close the channel.
func (c *Control) Told() <-chan Statement { return c.statements }

// note queues a statement for Told's reader, or drops it if the queue is full.
func (c *Control) note(s Statement) {
	select {
	case c.statements <- s:
	default:
	}
}
