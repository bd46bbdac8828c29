// Package train is the demo's job: a small neural network trained for real,
// data-parallel × tensor-parallel × pipeline-parallel, over Lockstep's own CCL.
//
// Each step uses the communicators as a large training would: Send/Recv of
// activations and their gradients between pipeline stages, AllReduce inside a
// tensor-parallel pair, ReduceScatter of gradients and AllGather of parameters
// over the data-parallel replicas (the optimizer's state is sharded), AllReduce
// of the loss over the world, Barrier around checkpoints. On GPU ranks all of
// these are on device memory; the arithmetic is tiny and stays on the CPU.
//
// The data set comes from a seed and every reduction has a fixed order, so a
// run is a function of its configuration: after a kill and a restart from a
// checkpoint, the losses equal those of an undisturbed run bit for bit.
// Replicas that shrink to the survivors instead go on from the same checkpoint.
package train
