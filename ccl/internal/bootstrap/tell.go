package bootstrap

// maxStatement bounds what Tell carries, maxTold how many wait to be read.
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
// rank is stuck in. It never blocks and is best effort: one that finds a queue
// full is lost.
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

// Told has what members told rank 0. It is closed by Close or Leave.
func (c *Control) Told() <-chan Statement { return c.statements }

// note hands a statement to Told's reader, if it keeps up.
func (c *Control) note(s Statement) {
	select {
	case c.statements <- s:
	default:
	}
}
