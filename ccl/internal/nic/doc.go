// Package nic finds out which NIC a rank should use, and under which address.
//
// In: the files below /sys, as an fs.FS. Out: a Tree of RDMA devices, their
// ports and GIDs, and of the node's PCIe devices; from it Select orders the
// ports for a rank near a GPU or NUMA node, primary first, each with the reason
// in words, and Rails pairs the ports of two ranks.
//
// Distances follow NCCL's: one PCIe switch in between, several below one root
// port, one host bridge, one NUMA node, none of these. A NIC that has a second
// PCIe function for data (Direct NIC, ConnectX-8) is as near as that function.
//
// A file of sysfs may be missing, unreadable, or hold anything: what it would
// have told is unknown then, and the rest is used. A read that hangs, hangs the
// caller. The package opens no device: that a port is active here does not mean
// that verbs can use it.
package nic
