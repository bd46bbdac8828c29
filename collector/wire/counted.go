package wire

import (
	"errors"
	"io"
	"net"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
)

// Counted counts the handshakes of a listener that fail, but for those of who hangs up, as
// probes of a port do.
func Counted(c credentials.TransportCredentials, refused *atomic.Uint64) credentials.TransportCredentials {
	return &counted{c, refused}
}

type counted struct {
	credentials.TransportCredentials
	refused *atomic.Uint64
}

func (c *counted) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	out, info, err := c.TransportCredentials.ServerHandshake(conn)
	if err != nil && !errors.Is(err, io.EOF) {
		c.refused.Add(1)
	}
	return out, info, err
}

func (c *counted) Clone() credentials.TransportCredentials {
	return &counted{c.TransportCredentials.Clone(), c.refused}
}
