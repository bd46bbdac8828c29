package rules

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// gpus tells of GPUs that are broken or about to be. That a job stands still
// because of one is the verdicts' to tell.
func gpus(c Config) []alert {
	const gpu = `GPU {{ $labels.gpu }} of {{ $labels.instance }}`
	xids := func(effect, severity, summary, description string) alert {
		return alert{
			name: names.AlertGPUXidFatal, severity: severity,
			expr: promql(`
sum by (instance, gpu, xid, effect) (
{increase}
) > 0`, "increase", newlyIn(names.GPUXids, fmt.Sprintf(`{%s="%s"}`, names.LabelEffect, effect), c.GPUWindow)),
			summary:     gpu + ` reported Xid {{ $labels.xid }}` + summary,
			description: description + ` What the code means is in NVIDIA's Xid catalogue and in the agent's log.`,
			dashboard:   names.DashboardGPU,
		}
	}
	return []alert{
		xids(names.EffectGPU, critical, `: it needs a reset or more`,
			`Whatever ran on the GPU has ended or will, and what is started on it again fails as well until the GPU is reset, the node restarted or the GPU replaced.`),
		xids(names.EffectApplication, warning, `: the process on it has ended`,
			`The process that used the GPU cannot go on. The GPU itself is fit for use; a fault of the program is likelier than one of the hardware.`),
		{
			name: names.AlertGPULost, severity: critical,
			expr:        promql(`max by (instance, gpu) ({up}) == 0`, "up", names.GPUUp),
			summary:     gpu + ` does not answer its driver`,
			description: `It has fallen off the bus, or its driver has given it up. Nothing runs on it until the node has been restarted, or for good.`,
			dashboard:   names.DashboardGPU,
		},
		{
			name: names.AlertGPUDriverUnresponsive, severity: critical,
			expr:        promql(`max by (instance) ({unresponsive}) == 1`, "unresponsive", names.GPUDriverUnresponsive),
			summary:     `The GPU driver of {{ $labels.instance }} does not answer`,
			description: `A call into NVIDIA's driver has not returned for longer than it may take (--gpu.bound, 10 s). Processes that call it hang as well, often beyond SIGKILL. The agent's log names the call.`,
			dashboard:   names.DashboardGPU,
		},
		{
			name: names.AlertGPUUncorrectableECC, severity: warning,
			expr: promql(`sum by (instance, gpu) (increase({ecc}{kind="{kind}", lifetime="{lifetime}"}[{window}])) > 0`,
				"ecc", names.GPUECCErrors, "kind", names.KindUncorrected, "lifetime", names.LifetimeVolatile, "window", c.GPUWindow),
			summary:     gpu + ` has had an uncorrectable memory error`,
			description: `The data in question is lost, and what used it has ended. The row is replaced by a spare one at the next reset of the GPU.`,
			dashboard:   names.DashboardGPU,
		},
		{
			name: names.AlertGPURowRemapFailure, severity: warning,
			expr:        promql(`max by (instance, gpu) ({failure}) == 1`, "failure", names.GPURemapFailure),
			summary:     gpu + ` has no spare memory rows left`,
			description: `A row of memory with errors could not be remapped. The next error there ends what uses it, again and again: the GPU is to be replaced.`,
			dashboard:   names.DashboardGPU,
		},
		{
			name: names.AlertGPUNVLinkErrors, severity: warning,
			expr: promql(`
sum by (instance, gpu) (increase({recoveries}[{window}])) > 0
or
sum by (instance, gpu) (increase({replays}[{window}])) > 0
or
max by (instance, gpu) (
  {up} == 0
  and
  max_over_time({up}[{memory}]) == 1
) == 0`,
				"recoveries", names.GPUNVLinkRecoveries, "replays", names.GPUNVLinkReplays, "up", names.GPUNVLinkUp, "window", c.GPUWindow, "memory", c.Memory),
			summary:     gpu + ` has trouble with its NVLinks`,
			description: `A link was trained again, had to replay data, or is down and was up before. Collectives through it are slow or stall; the other end of the link may be to blame as well.`,
			dashboard:   names.DashboardGPU,
		},
		{
			name: names.AlertGPUThrottled, hold: c.TroubleFor, severity: warning,
			expr: promql(`max by (instance, gpu, reason) ({throttled}{reason=~"{reasons}"}) == 1`,
				"throttled", names.GPUThrottled, "reasons", names.ThrottleSWThermal+"|"+names.ThrottleHWThermal+"|"+names.ThrottlePowerBrake),
			summary:     gpu + ` is slowed down ({{ $labels.reason }})`,
			description: `The clocks are lowered by heat or by the power supply, and every rank waits for the one on this GPU. A GPU at its power limit (power_cap) is normal and not meant.`,
			dashboard:   names.DashboardGPU,
		},
	}
}
