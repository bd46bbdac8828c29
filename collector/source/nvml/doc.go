// Package nvml is the source that asks NVIDIA's driver for the health of a
// node's GPUs: Xids, ECC errors and remapped rows, NVLink states and errors, why
// clocks are low, temperatures, power, clocks, PCIe, and who computes where.
//
// In: libnvidia-ml.so.1, opened at run time, and the recorders' device tables.
// Out: the view's GPUs, and for each process the state of the GPU that it uses,
// found by the UUID in its recorder or by its pid. Without the library, the
// driver or a GPU the source has no data, which is no failure; it says so once
// and looks again every minute.
//
// A call into a driver in trouble may never return. So no call happens in the
// agent's goroutine: a probe of all GPUs runs in one of its own, at most one at
// a time, and another goroutine waits for Xids. A probe that does not come back
// in time makes the driver unresponsive (that is evidence, too) until it does;
// nothing is started meanwhile. What a GPU cannot tell is absent, never zero,
// and a call that fails costs its own value only.
//
// The package changes no setting, resets nothing, and needs no privilege.
// While it runs it holds the devices open: stop the agent before a GPU is reset.
// Pages retired by GPUs before Ampere, which have no row remapping, are not read.
//
// Reading order: source.go, process.go, library.go.
package nvml
