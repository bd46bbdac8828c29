// Package rdma is the source that watches a node's RDMA ports: their states
// and how often these change, what had to be sent again, marks of congestion, errors,
// bytes.
//
// In: the files below /sys/class/infiniband and /sys/class/net, and the
// kernel's announcements of changes of links (RTM_NEWLINK). Out: the view's NICs.
// Without an RDMA device the source has no data, which is no failure; it looks
// again every minute.
//
// A read may ask a NIC's firmware, and never return while that is in trouble.
// So no read happens in the agent's goroutine: a probe of all ports runs in one
// of its own, at most one at a time, and one that does not come back in time
// is evidence, too. A file that cannot be read, or holds no number, costs its own value
// only, and is counted.
//
// A port that goes down and comes back between two probes is seen all the
// same: the kernel counts losses of carrier, and announces them. An InfiniBand
// port without an interface has only its own counter link_downed.
//
// Reading order: source.go, links.go, sysfs.go, counters.go.
package rdma
