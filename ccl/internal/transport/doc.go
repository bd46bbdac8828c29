// Package transport moves bytes between the ranks of one communicator.
//
// In: who the ranks are (through an exchange that bootstrap provides), and the
// bytes that the communicator's executor posts, one goroutine at a time. Out:
// the same bytes at the peer, in order, read in place where that is possible;
// and what the pipeline wants to know of each connection: posted, completed,
// outstanding, why it is slow (package windowmon), in the flight recorder.
//
// Ranks of one node share one memory file per communicator: for each ordered
// pair a ring of bytes and a ring of 64-byte lines whose flag travels in the
// line itself. Ranks of different nodes write into each other's memory by RDMA
// (package rdma), or have a few TCP sockets a pair, striped; with credits of the
// receiver's, so that a slow network and a slow peer differ; when the sockets fail, or carry
// nothing, others take their place, and no byte is lost or repeated. Nothing here blocks but Mesh.Wait, and nothing here decides that a
// peer is dead: that is bootstrap's word, which arrives as Config.Err and Wake.
package transport
