package slurm

import (
	"errors"
	"testing"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// TestWhatCommandsSay: a controller that is away is no failure of an action; what it says is.
func TestWhatCommandsSay(t *testing.T) {
	exit := errors.New("exit status 1")
	for said, want := range map[string]error{
		"scontrol: error: slurm_update error: Unable to contact slurm controller (connect failure)": remediation.ErrAway,
		"slurm_load_jobs error: Socket timed out on send/recv operation":                            remediation.ErrAway,
		"slurm_load_jobs error: Zero Bytes were transmitted or received":                            remediation.ErrAway,
		"slurm_load_jobs error: Slurm backup controller in standby mode":                            remediation.ErrAway,
		"slurm_load_jobs error: Invalid job id specified":                                           remediation.ErrGone,
		"slurm_update error: Access/permission denied":                                              ErrDenied,
		"Job is no longer pending execution for job 7":                                              ErrNotPending,
		"slurm_update error: Invalid node name specified":                                           exit,
	} {
		if err := explain("scontrol", []string{"update"}, said, exit); !errors.Is(err, want) || want != remediation.ErrAway && errors.Is(err, remediation.ErrAway) {
			t.Errorf("%s: %v", said, err)
		}
	}
}
