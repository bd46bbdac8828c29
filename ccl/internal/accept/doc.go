// Package accept takes connections in from a network on which anybody may connect.
//
// In: a listener, and a function that authenticates one connection. Out: that function, in a
// goroutine of its own for each connection, and counts of those that were refused.
//
// Who has proved nothing yet is a stranger. There is room for a bounded number of them, and
// for fewer of one address. A stranger waits in the lobby, where it costs a descriptor, until its first
// message is in the kernel's buffer; what this looks like (Options.Look) decides whether it is
// served. When the room is full the oldest stranger goes, of the address that has
// most of them, once it has had a moment to say who it is; until then a newcomer gets in only if
// its first message looks like a member's. Such a one, and who has
// said something that only a member of the job can (Conn.Known), is pushed out by no stranger.
//
// Accepting never waits for anything: while it did, the kernel's queue would fill, and drop
// members' connections. While there is no room that queue is kept short, since a member waits in it for
// all who came before, and Dial, which members use, makes up for the SYNs that it drops. So a flood
// costs members a moment each, and this process a bounded number of descriptors and goroutines.
//
// Whoever comes is not told why it was refused. The package knows no protocol: what is said,
// and by when, is the function's business.
package accept
