package flags

import (
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// Masters reads --master flags, [JOB=]HOST:PORT each, {job} standing for the job's
// name. The result gives a job's address, "" when none is known.
func Masters(list []string) (func(job string) string, error) {
	byJob, all := map[string]string{}, ""
	for _, m := range list {
		job, addr, ok := strings.Cut(m, "=")
		if !ok {
			job, addr = "", m
		}
		if err := Dial("master", strings.ReplaceAll(addr, "{job}", "job")); err != nil {
			return nil, err
		}
		switch {
		case job == "" && all != "":
			return nil, fmt.Errorf("--master %s: %s is already the master of all jobs", m, all)
		case job == "":
			all = addr
		default:
			byJob[job] = addr
		}
	}
	return func(job string) string {
		if addr, ok := byJob[job]; ok {
			return addr
		}
		if wire.CheckJob(job) != nil {
			return "" // an address is not made of what a rank or an alert wrote
		}
		return strings.ReplaceAll(all, "{job}", job)
	}, nil
}
