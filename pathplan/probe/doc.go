// Package probe finds out which path through a fabric each source port takes, and how the
// paths fare.
//
// In go addresses, ports and names of the switches' interfaces; out come hops by source
// port ([Trace]), a map from path to ports ([Names.Sort]), and counts of probes sent and
// lost by path ([Pinger]). A trace is a TCP connection attempt, or a UDP packet, from a
// bound source port whose TTL runs out at the switch that is asked for; the kernel hands
// its ICMP answer to the socket's error queue (IP_RECVERR). So nothing needs a privilege, and
// probes hash as the data does. Where switches do not answer, there are no hops, and loss
// is known from end to end only.
//
// Everything is bounded: sockets at a time, packets a second, places of a [Responder].
// The package knows no plan and sends nothing by itself.
package probe
