package rules

import (
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// noMaster mutes a fallback wherever a master answers.
var noMaster = promql(`unless on (training_job) {open}`, "open", names.IncidentsOpen)

// fallbacks tell hang from slowness, and communication from the rest, out of
// the agents' metrics alone. They name a communicator, never a rank, and are
// suspected: no policy acts on them.
func fallbacks(c Config) []alert {
	f := c.Fallback
	alone := ` No master answers for this job, so this is judged from the agents' metrics alone: nobody is named and nothing is restarted.`
	hang := func(name, class, comparison, summary, description string) alert {
		return alert{
			name: name,
			// The oldest open collective is where the wait began. Its communicator
			// ends nothing. When every rank of the job is inside some collective,
			// the data does not move; when one is in none, the others wait for it.
			// (Counting within the communicator would not do: its series holds all
			// groups of that name, and the others wait elsewhere.)
			expr: promql(`
(
  topk by (training_job) (1, max by (training_job, communicator) ({oldest})) > {after}
  unless on (training_job, communicator)
    sum by (training_job, communicator) (rate({collectives}[{window}])) > 0
)
and on (training_job) (
  sum by (training_job) ({inside})
  {comparison} on (training_job)
  max by (training_job) (sum by (training_job, communicator) ({members}))
)
{noMaster}`,
				"oldest", names.CommOldestOpen, "after", f.HangAfter.Seconds(),
				"collectives", names.Collectives, "window", c.Window,
				"inside", names.CommOpenMembers, "comparison", comparison, "members", names.CommMembers,
				"noMaster", noMaster),
			hold:     f.For,
			severity: critical,
			labels:   map[string]string{names.LabelClass: class, names.LabelLevel: names.LevelSuspected},
			summary:  `{{ $labels.training_job }}: ` + summary + `, no master`,
			description: `The oldest collective in communicator {{ $labels.communicator }} has been open for {{ $value | humanizeDuration }} and none ends there. ` +
				description + alone,
			dashboard: names.DashboardCommunicator,
		}
	}
	slow := func(class, comparison, summary, description string) alert {
		return alert{
			name: names.AlertFallbackSlow,
			// The part of the time that grew most decides the class.
			expr: promql(`
{duration} > {ratio} * {duration} offset {offset} + {floor}
and
({wait} - {wait} offset {offset}) / ({duration} - {duration} offset {offset}) {comparison} 0.5
{noMaster}`,
				"duration", durationMean, "wait", waitMean,
				"ratio", f.SlowRatio, "floor", f.SlowFloor.Seconds(), "offset", f.SlowOffset,
				"comparison", comparison, "noMaster", noMaster),
			hold:        f.For,
			severity:    warning,
			labels:      map[string]string{names.LabelClass: class, names.LabelLevel: names.LevelSuspected},
			summary:     `{{ $labels.training_job }}: ` + summary + `, no master`,
			description: `{{ $labels.collective }} in communicator {{ $labels.communicator }} takes {{ $value | humanizeDuration }} on average, much more than it did ` + dur(f.SlowOffset) + ` ago. ` + description + alone,
			dashboard:   names.DashboardCommunicator,
		}
	}
	return []alert{
		hang(names.AlertFallbackCommunicationHang, names.ClassCommunicationHang, ">=", "communication hang",
			`Every rank is inside a collective: the data does not move.`),
		hang(names.AlertFallbackNoncommunicationHang, names.ClassNoncommunicationHang, "<", "hang outside communication",
			`Some rank is inside no collective, and the others wait for it.`),
		slow(names.ClassCommunicationSlow, "<=", "communication slow",
			`Most of the growth is transfer.`),
		slow(names.ClassNoncommunicationSlow, ">", "straggler",
			`Most of the growth is waiting for members that enter late.`),
	}
}

// Recorded means, for the comparison with their own past.
const (
	durationMean = "communicator:lockstep_collective_duration_seconds:mean"
	waitMean     = "communicator:lockstep_collective_wait_seconds:mean"
)

func means(c Config) []recording {
	return []recording{
		{durationMean, mean(names.CollectiveDuration, c.Fallback.SlowWindow)},
		{waitMean, mean(names.CollectiveWait, c.Fallback.SlowWindow)},
	}
}

// mean is the mean of a histogram over a window, from its native form where
// that is scraped, else from its classic one.
func mean(m *names.Metric, window time.Duration) string {
	return promql(`
histogram_avg(sum by (training_job, communicator, collective) (rate({m}[{w}])))
or
sum by (training_job, communicator, collective) (rate({m}_sum[{w}]))
/ sum by (training_job, communicator, collective) (rate({m}_count[{w}]))`, "m", m, "w", window)
}
