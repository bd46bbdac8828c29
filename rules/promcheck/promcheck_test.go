package promcheck_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ccl/lockstep/rules/promcheck"
)

func TestLabels(t *testing.T) {
	for _, tc := range []struct {
		query string
		want  []string // labels of the result
		err   string   // or a part of the error
	}{
		{query: `lockstep_breaker_open == 1`, want: []string{"instance", "job", "scope"}},
		{query: `sum by (training_job) (rate(lockstep_collectives_total{result!="ok"}[5m]))`, want: []string{"training_job"}},
		{query: `sum without (job, instance, transport) (lockstep_connections)`, want: []string{"training_job"}},
		{query: `histogram_quantile(0.9, sum by (communicator, le) (rate(lockstep_collective_wait_seconds_bucket[5m])))`, want: []string{"communicator"}},
		{query: `topk by (training_job) (1, lockstep_step)`, want: []string{"instance", "job", "training_job"}},
		{query: `up == 0 and on (job, instance) last_over_time(lockstep_build_info{component="agent"}[1h])`, want: []string{"instance", "job"}},
		{query: `lockstep_agent_stream_connected * on (instance) group_left (version) lockstep_build_info`, want: []string{"instance", "job", "training_job", "version"}},
		{query: `sum by (training_job) (lockstep_ranks) / on (training_job) max by (training_job) (lockstep_job_world_size)`, want: []string{"training_job"}},
		{query: `label_replace(lockstep_job_step, "node", "$1", "instance", "(.*):.*")`, want: []string{"instance", "job", "node", "training_job"}},
		{query: `1 - vector(0)`},

		{query: `sum(`, err: "parse error"},
		{query: `{training_job="x"}`, err: "names no metric"},
		{query: `lockstep_no_such_metric`, err: "lockstep_no_such_metric is not defined"},
		{query: `lockstep_collectives_total_bucket`, err: "is not defined"},
		{query: `lockstep_job_step{rank="1"}`, err: "lockstep_job_step has no label rank"},
		{query: `lockstep_collective_wait_seconds{le="1"}`, err: "has no label le"},
		{query: `sum by (rank) (lockstep_job_step)`, err: "no label rank"},
		{query: `lockstep_job_step and on (communicator) lockstep_communicator_members`, err: "left side: no label communicator"},
		{query: `lockstep_communicator_members unless on (communicator) lockstep_job_step`, err: "right side: no label communicator"},
		{query: `rate(lockstep_job_step[5m])`, err: "a gauge"},
		{query: `deriv(lockstep_collectives_total[5m])`, err: "a counter"},
	} {
		got, err := promcheck.Labels(tc.query)
		if tc.err != "" {
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("%s: err = %v, want %q", tc.query, err, tc.err)
			}
			continue
		}
		if err != nil {
			t.Error(err)
		} else if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: labels (-want +got):\n%s", tc.query, diff)
		}
	}
}
