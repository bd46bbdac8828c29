package collector

import "github.com/lockstep-ccl/lockstep/diagnosis"

// GPUs is what an agent knows of its node's GPUs, as of the last probe that
// returned. It is not changed once it is published. Times are CLOCK_MONOTONIC ns.
type GPUs struct {
	DriverVersion string `json:"driver_version,omitempty"`
	ProbedAt      int64  `json:"-"`
	ProbeNs       int64  `json:"probe_ns"` // duration of the last probe
	// UnresponsiveAt is since when a call into the driver has not returned, 0
	// when it answers; Hangs names the call.
	UnresponsiveAt int64  `json:"-"`
	Hangs          string `json:"hangs,omitempty"`
	XidsDropped    uint64 `json:"xids_dropped,omitempty"` // Xids that came faster than they were read
	GPUs           []GPU  `json:"gpus"`
}

// GPU is one GPU. What it, its driver or the permissions cannot tell is nil,
// never zero. Counters count from the driver's start, unless they say otherwise.
type GPU struct {
	Index int    `json:"index"`          // NVML's, in PCI order; not CUDA's ordinal
	UUID  string `json:"uuid,omitempty"` // "" when the agent may not look at it: see Failed
	Model string `json:"model,omitempty"`
	BusID string `json:"pci_bus_id,omitempty"`

	// LostAt is since when the GPU does not answer its driver: it has fallen off
	// the bus, or was given up. Nothing else is known of it then but its Xids.
	LostAt int64 `json:"-"`
	Lost   bool  `json:"lost"`

	Temperature       *float64 `json:"temperature_celsius,omitempty"`
	MemoryTemperature *float64 `json:"memory_temperature_celsius,omitempty"`
	Power             *float64 `json:"power_watts,omitempty"`
	PowerLimit        *float64 `json:"power_limit_watts,omitempty"`
	Energy            *float64 `json:"energy_joules,omitempty"`
	SMClock           *float64 `json:"sm_clock_hertz,omitempty"`
	MemoryClock       *float64 `json:"memory_clock_hertz,omitempty"`
	Utilization       *float64 `json:"utilization_ratio,omitempty"` // share of the last sample in which a kernel ran
	MemoryUsed        *float64 `json:"memory_used_bytes,omitempty"`
	MemoryTotal       *float64 `json:"memory_total_bytes,omitempty"`

	PCIeReplays    *float64 `json:"pcie_replays,omitempty"`
	PCIeGeneration *float64 `json:"pcie_generation,omitempty"`
	PCIeWidth      *float64 `json:"pcie_width,omitempty"`
	PCIeMaxWidth   *float64 `json:"pcie_max_width,omitempty"`

	Corrected   ECC `json:"ecc_corrected"`
	Uncorrected ECC `json:"ecc_uncorrected"`

	// Rows of memory remapped after errors, over the GPU's life. Pending ones wait
	// for a reset; after a failure there was no spare row left.
	RowsCorrected   *float64 `json:"rows_remapped_corrected,omitempty"`
	RowsUncorrected *float64 `json:"rows_remapped_uncorrected,omitempty"`
	RemapPending    *float64 `json:"row_remap_pending,omitempty"` // 0 or 1
	RemapFailure    *float64 `json:"row_remap_failure,omitempty"` // 0 or 1

	// Throttle is why clocks are low; ThrottledAt since when a reason of
	// diagnosis.SlowedDown has been among them at each probe.
	Throttle    *diagnosis.Throttle `json:"throttle,omitempty"`
	ThrottledAt int64               `json:"-"`

	Links []NVLink `json:"nvlinks,omitempty"`
	PIDs  []int32  `json:"pids,omitempty"` // that compute on it, in the PID namespace of the driver; empty and not nil when none does
	Xids  []Xid    `json:"xids,omitempty"` // reported while the agent ran, by code
	// Failed are the calls that failed at the last probe though the GPU supports
	// them, with what they said.
	Failed []string `json:"failed,omitempty"`
}

// ECC counts memory errors since the driver's start and over the GPU's life.
type ECC struct {
	Volatile  *float64 `json:"volatile,omitempty"`
	Aggregate *float64 `json:"aggregate,omitempty"`
}

// NVLink is one link of a GPU.
type NVLink struct {
	Link       int      `json:"link"`
	Up         bool     `json:"up"`
	CRC        *float64 `json:"crc_errors,omitempty"`
	Replays    *float64 `json:"replays,omitempty"`
	Recoveries *float64 `json:"recoveries,omitempty"`
}

// Xid counts the reports of one code.
type Xid struct {
	Code  uint32 `json:"code"`
	Count uint64 `json:"count"`
	At    int64  `json:"-"` // of the last one
}
