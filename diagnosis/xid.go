package diagnosis

import "fmt"

// XidEffect is whom an Xid ends.
type XidEffect uint8

const (
	XidUnknown     XidEffect = iota // not in the table: told, and never taken for a reason
	XidInfo                         // nobody: handled, or the echo of another one
	XidApplication                  // the process on the GPU; a restarted one may use it at once
	XidGPU                          // the GPU: it needs a reset, or its node a restart, before anyone can use it
)

func (e XidEffect) String() string {
	return [...]string{"unknown", "info", "application", "gpu"}[min(int(e), 3)]
}

// Fatal reports whether the process that uses the GPU cannot go on.
func (e XidEffect) Fatal() bool { return e >= XidApplication }

// DescribeXid says what a code of NVIDIA's driver means, in a few words, and
// whom it ends. The effects are the immediate actions of NVIDIA's Xid catalogue
// (RESTART_APP, RESET_GPU, RESTART_BM, IGNORE) for Ampere and later. Where the
// catalogue has a workflow in place of an action, the effect is that of
// its usual end.
func DescribeXid(code uint32) (text string, effect XidEffect) {
	if x, ok := xids[code]; ok {
		return x.text, x.effect
	}
	return "not in the table", XidUnknown
}

// xids holds what a data-centre GPU reports. Engines that no training job uses
// (video, JPEG, optical flow) are left out.
var xids = map[uint32]struct {
	text   string
	effect XidEffect
}{
	8:   {"the GPU stopped processing", XidApplication},
	11:  {"invalid or corrupted push buffer", XidApplication},
	13:  {"exception of the compute engine, such as an illegal instruction or an access out of bounds", XidApplication},
	25:  {"invalid or illegal push buffer", XidApplication},
	31:  {"page fault of the GPU's memory, such as an illegal address", XidApplication},
	32:  {"corrupted push buffer, often the PCIe link", XidApplication},
	37:  {"driver firmware error", XidInfo},
	38:  {"driver firmware error", XidInfo},
	39:  {"exception of copy engine 0", XidApplication},
	40:  {"exception of copy engine 1", XidApplication},
	41:  {"exception of copy engine 2", XidApplication},
	43:  {"the application's channel was reset after a fault of its own", XidApplication},
	44:  {"fault during a context switch", XidInfo},
	45:  {"clean-up after an earlier error, or after the application was ended", XidInfo},
	46:  {"the GPU stopped processing", XidGPU},
	48:  {"uncorrectable (double-bit) ECC error", XidGPU},
	54:  {"auxiliary power is not connected", XidGPU},
	61:  {"internal microcontroller breakpoint", XidGPU},
	62:  {"internal microcontroller halt", XidGPU},
	63:  {"a memory row was marked for remapping", XidInfo},
	64:  {"a memory row could not be remapped", XidGPU},
	66:  {"illegal access by the driver", XidInfo},
	67:  {"illegal access by the driver", XidInfo},
	68:  {"exception of video decoder 0", XidApplication},
	69:  {"class error of the compute engine", XidApplication},
	70:  {"error of copy engine 3", XidApplication},
	71:  {"error of copy engine 4", XidApplication},
	72:  {"error of copy engine 5", XidApplication},
	74:  {"NVLink error", XidGPU},
	75:  {"error of copy engine 6", XidApplication},
	76:  {"error of copy engine 7", XidApplication},
	77:  {"error of copy engine 8", XidApplication},
	79:  {"the GPU has fallen off the bus", XidGPU},
	80:  {"corrupted data sent to the GPU", XidApplication},
	85:  {"error of copy engine 9", XidApplication},
	92:  {"high rate of corrected (single-bit) ECC errors", XidInfo},
	93:  {"the InfoROM's wear limit is reached", XidInfo},
	94:  {"uncorrectable memory error, contained to one application", XidApplication},
	95:  {"uncorrectable memory error, not contained", XidGPU},
	109: {"time-out of a context switch", XidGPU},
	110: {"security fault", XidGPU},
	119: {"time-out of a call into the GPU's system processor (GSP)", XidGPU},
	120: {"error of the GPU's system processor (GSP)", XidGPU},
	121: {"corrected error on the link to the CPU (C2C)", XidInfo},
	136: {"NVLink training failed", XidGPU},
	137: {"illegal access of a peer's memory over NVLink", XidApplication},
	140: {"uncorrectable ECC error that could not be contained", XidGPU},
	141: {"error of CUDA's fast path", XidInfo},
	143: {"the GPU could not be initialised", XidGPU},
	144: {"NVLink error (SAW)", XidGPU},
	145: {"NVLink error (RLW)", XidGPU},
	146: {"NVLink error (TLW)", XidGPU},
	147: {"NVLink error (TREX)", XidInfo},
	148: {"NVLink error (NVLPW)", XidInfo},
	149: {"NVLink error (NETIR)", XidGPU},
	150: {"NVLink error (MSE)", XidGPU},
	151: {"key rotation error", XidGPU},
	154: {"the recovery that the GPU needs has changed", XidInfo},
	155: {"an NVLink was taken down by software", XidInfo},
	156: {"a resource of the GPU was retired", XidInfo},
	157: {"a resource of the GPU could not be retired", XidInfo},
	158: {"fatal time-out of the GPU", XidGPU},
	167: {"fatal time-out of PCIe", XidGPU},
	169: {"internal microcontroller halt", XidGPU},
	171: {"uncorrectable error in DRAM", XidGPU},
	172: {"uncorrectable error in SRAM", XidGPU},
}

// xidPhrase names a rank's Xid, in full when it is in the table.
func xidPhrase(code uint32) string {
	if text, effect := DescribeXid(code); effect != XidUnknown {
		return fmt.Sprintf("Xid %d (%s)", code, text)
	}
	return fmt.Sprintf("Xid %d", code)
}
