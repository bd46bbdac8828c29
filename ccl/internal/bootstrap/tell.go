package bootstrap

// maxStatement bounds a statement in bytes, maxTold the number of unread ones.
const (
	maxStatement = 256
	maxTold      = 1024
)

// Statement is what a member told rank 0.
type Statement struct {
	Rank int
	Blob []byte
}

// Tell gives rank 0 a short statement (at most 256 bytes), such as what this
// rank is stuck in. It never blocks and is best effort: a statement that is too
// long or finds a queue full is dropped.
func (c *Control) Tell(blob []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != stateJoined || len(blob) > maxStatement {
		return
	}
	blob = append([]byte(nil), blob...)
	if c.rank == 0 {
		c.note(Statement{0, blob})
	} else if p := c.peers[0]; p != nil && p.waiting() < maxQueue/2 {
		p.send(seal(appendBytes(frame(frameTell), blob)))
	}
}

// Told delivers the members' statements on rank 0. Close and Leave close it.
func (c *Control) Told() <-chan Statement { return c.statements }

// note hands a statement to Told's reader, if it keeps up.
func (c *Control) note(s Statement) {
	select {
	case c.statements <- s:
	default:
	}
}
