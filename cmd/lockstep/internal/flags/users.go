package flags

import (
	"fmt"
	"os/user"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// JobUsers reads --job-user flags, JOB=USER each, a user's name or number.
func JobUsers(list []string) (map[string]uint32, error) {
	users := map[string]uint32{}
	for _, u := range list {
		job, name, ok := strings.Cut(u, "=")
		if !ok || job == "" || name == "" {
			return nil, fmt.Errorf("--job-user %s: not of the form JOB=USER", u)
		}
		if err := wire.CheckJob(job); err != nil {
			return nil, fmt.Errorf("--job-user %s: %w", u, err)
		}
		if _, twice := users[job]; twice {
			return nil, fmt.Errorf("--job-user %s: job %s has a user already", u, job)
		}
		uid := name
		if known, err := user.Lookup(name); err == nil {
			uid = known.Uid
		}
		n, err := strconv.ParseUint(uid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("--job-user %s: this machine has no user %q: give a number (id -u)", u, name)
		}
		users[job] = uint32(n)
	}
	return users, nil
}
