package accept

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
)

// Listen is net.Listen for an Acceptor. It turns off Multipath TCP, which Go's listeners use where the
// kernel has it: such sockets lack some of TCP's options, such as filters, and each connection costs
// more.
func Listen(address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(context.Background(), "tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%w: another program listens there, perhaps one that was started before; choose another port (0: any that is free)", err)
	}
	return l, err
}
