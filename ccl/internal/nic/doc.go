// Package nic finds out which NIC a rank should use, and with which address.
//
// In: the files below /sys, as an fs.FS. Out: a Tree of RDMA devices, their ports and GIDs, and the
// node's PCIe devices. Select orders the ports for a rank near a GPU or NUMA node, the primary first,
// each with a reason in words. Rails pairs the ports of two ranks.
//
// Distances are NCCL's: one PCIe switch in between, several below one root port, one host bridge, one
// NUMA node, none of these. The distance of a NIC that has a second PCIe function for data (Direct
// NIC, ConnectX-8) is that of the function.
//
// A file of sysfs may be missing, unreadable, or malformed. Its information is then unknown, and the
// rest is used. A read that hangs blocks the caller. The package opens no device, so verbs may be
// unable to use a port that is active here.
package nic
