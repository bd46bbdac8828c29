// Package accept accepts TCP connections on a network on which anyone may connect, and bounds what
// unauthenticated peers can make this process spend.
//
// In: a listener, and a function that authenticates one connection. Out: a call of that function in
// its own goroutine for each connection that is served, and counts of the refused connections.
//
// A connection begins unauthenticated. The number of such connections is bounded, also per address.
// It is pending until its first message is in the kernel's buffer, and costs one descriptor until
// then. Options.Inspect looks at the message, and decides whether the connection is served. If there
// are too many, the oldest unauthenticated connection of the address with the most is evicted, once
// it has had a short time (grace) to send. Until then, a new connection is admitted only if its first
// message is plausible. Unauthenticated connections evict neither plausible connections nor
// authenticated ones (Conn.Authenticated).
//
// The accept loop never blocks. If it did, the kernel's backlog would fill up and drop members'
// connections. When there is no room, the backlog is kept short, because a member waits in it behind
// all earlier connections. Dial, which members use, makes up for the SYNs that a short backlog drops.
// So a flood delays members a little, and costs this process a bounded number of descriptors and
// goroutines.
//
// A refused peer does not learn why. The package knows no protocol: Inspect and Serve do.
package accept
