package accept

import (
	"context"
	"net"
)

// Listen listens as net.Listen does, for a Door, but not for Multipath TCP, which Go's listeners speak where the kernel can:
// it knows not all of TCP's options, filters among them, and each connection costs more.
func Listen(address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return c.Listen(context.Background(), "tcp", address)
}
