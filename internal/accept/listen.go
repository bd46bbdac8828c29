package accept

import (
	"context"
	"net"
)

// Listen is net.Listen for an Acceptor. It turns off Multipath TCP, which Go's listeners use where the
// kernel has it: such sockets lack some of TCP's options, such as filters, and each connection costs
// more.
func Listen(address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return c.Listen(context.Background(), "tcp", address)
}
