package slurm

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// job is what Slurm says of a job now.
type job struct {
	id        string
	restarts  int
	state     string
	user      string
	partition string
	batchHost string
	started   time.Time // when it runs, or is to
	nodes     []string
	comment   string
}

// Slurm's states in which a job is over.
var finished = []string{
	"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
}

func (j *job) over() bool { return slices.Contains(finished, j.state) }

// column is one of squeue's, of fixed width: texts of users in other columns cannot shift it.
type column struct {
	name  string
	width int
}

var (
	jobColumns = []column{
		{"JobID", 20}, {"RestartCnt", 12}, {"State", 24}, {"UserName", 72}, {"Partition", 72}, {"BatchHost", 72}, {"StartTime", 24}, {"NodeList", 16384}, {"Comment", 4096},
	}
	stepColumns = []column{{"StepID", 48}, {"StepState", 24}, {"StartTime", 24}, {"Nodes", 16384}, {"StepName", 80}}
)

// format is the columns as squeue wants them.
func format(columns []column) string {
	s := make([]string, len(columns))
	for i, c := range columns {
		s[i] = fmt.Sprintf("%s:%d", c.name, c.width)
	}
	return strings.Join(s, ",")
}

// table takes squeue's output apart. Records are told by their length, since what users
// write may hold line breaks.
func table(out string, columns []column) ([][]string, error) {
	total := 0
	for _, c := range columns {
		total += c.width
	}
	var rows [][]string
	for out != "" {
		if len(out) <= total || out[total] != '\n' {
			return nil, fmt.Errorf("slurm: squeue's output is not of %d columns of %d characters", len(columns), total)
		}
		row, at := make([]string, len(columns)), 0
		for i, c := range columns {
			row[i] = strings.TrimRight(out[at:at+c.width], " ")
			if row[i] == "(null)" || row[i] == "N/A" || row[i] == "n/a" {
				row[i] = ""
			}
			at += c.width
		}
		rows, out = append(rows, row), out[total+1:]
	}
	return rows, nil
}

// job asks for one job; remediation.ErrGone when Slurm knows none of that id.
func (c *client) job(ctx context.Context, id string) (*job, error) {
	out, err := c.run(ctx, "squeue", "-h", "-t", "all", "-j", id, "-O", format(jobColumns))
	if err != nil {
		return nil, err
	}
	rows, err := table(out, jobColumns)
	if err != nil {
		return nil, fmt.Errorf("job %s: %w", id, err)
	}
	rows = slices.DeleteFunc(rows, func(r []string) bool { return r[0] != id })
	switch len(rows) {
	case 0:
		return nil, fmt.Errorf("%w: slurm has no job %s", remediation.ErrGone, id)
	case 1:
	default:
		return nil, fmt.Errorf("slurm: %d jobs have the id %s: heterogeneous jobs are not acted on", len(rows), id)
	}
	r := rows[0]
	j := &job{id: r[0], state: r[2], user: r[3], partition: r[4], batchHost: r[5], started: unix(r[6]), comment: r[8]}
	if j.restarts, err = strconv.Atoi(r[1]); err != nil || j.restarts < 0 {
		return nil, fmt.Errorf("slurm: job %s: %q is no number of restarts", id, r[1])
	}
	j.nodes, err = c.expand(ctx, r[7])
	return j, err
}

func unix(s string) time.Time {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 {
		return time.Time{}
	}
	return time.Unix(n, 0)
}

// named returns the ids of a user's jobs of a name that are not over.
func (c *client) named(ctx context.Context, name string, users []string) ([]string, error) {
	columns := []column{{"JobID", 20}, {"UserName", 72}}
	args := []string{"-h", "-n", name, "-O", format(columns)}
	if !slices.Contains(users, "*") {
		args = append(args, "-u", strings.Join(users, ","))
	}
	out, err := c.run(ctx, "squeue", args...)
	if err != nil {
		return nil, err
	}
	rows, err := table(out, columns)
	var ids []string
	for _, r := range rows {
		if number.MatchString(r[0]) {
			ids = append(ids, r[0])
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), err
}

// step is a step of a job that was started by a Loop.
type step struct {
	id      string // JOB.STEP
	attempt int
	started time.Time
	nodes   []string
}

// steps returns the steps of Loops, the latest attempt last. A step stays among them until
// all its nodes have said that it is over, which a dead one does not.
func (c *client) steps(ctx context.Context, id string) ([]step, error) {
	out, err := c.run(ctx, "squeue", "-h", "-s", "-j", id, "-O", format(stepColumns))
	if err != nil {
		return nil, err
	}
	rows, err := table(out, stepColumns)
	if err != nil {
		return nil, fmt.Errorf("steps of job %s: %w", id, err)
	}
	var steps []step
	for _, r := range rows {
		n, ok := strings.CutPrefix(r[4], StepPrefix)
		attempt, err := strconv.Atoi(n)
		number, mine := strings.CutPrefix(r[0], id+".")
		if _, bad := strconv.Atoi(number); !ok || !mine || err != nil || bad != nil || attempt < 0 {
			continue
		}
		nodes, err := c.expand(ctx, r[3])
		if err != nil {
			return nil, err
		}
		steps = append(steps, step{id: r[0], attempt: attempt, started: unix(r[2]), nodes: nodes})
	}
	slices.SortFunc(steps, func(a, b step) int { return a.attempt - b.attempt })
	return steps, nil
}

// lastStep returns the youngest step of a job that is no Loop's, "" when it has none.
func (c *client) lastStep(ctx context.Context, id string) (string, error) {
	columns := []column{{"StepID", 48}}
	out, err := c.run(ctx, "squeue", "-h", "-s", "-j", id, "-O", format(columns))
	if err != nil {
		return "", err
	}
	rows, err := table(out, columns)
	last := -1
	for _, r := range rows {
		if s, ok := strings.CutPrefix(r[0], id+"."); ok {
			if n, err := strconv.Atoi(s); err == nil {
				last = max(last, n)
			}
		}
	}
	if last < 0 || err != nil {
		return "", err
	}
	return fmt.Sprintf("%s.%d", id, last), nil
}

// excluded returns the job's own list of nodes to leave out.
func (c *client) excluded(ctx context.Context, id string) ([]string, error) {
	out, err := c.run(ctx, "squeue", "-h", "-t", "all", "-j", id, "-o", "%x")
	if err != nil {
		return nil, err
	}
	return c.expand(ctx, strings.TrimSpace(out))
}

// expand makes names of a list as Slurm writes it: n[1-3,7].
func (c *client) expand(ctx context.Context, list string) ([]string, error) {
	if list == "" || list == "(null)" || list == "None" {
		return nil, nil
	}
	if !hostlist.MatchString(list) {
		return nil, fmt.Errorf("slurm: %.80q is no list of nodes", list)
	}
	if !strings.ContainsAny(list, "[") {
		return strings.Split(list, ","), nil
	}
	c.mu.Lock()
	known, ok := c.expanded[list]
	c.mu.Unlock()
	if ok {
		return known, nil
	}
	out, err := c.run(ctx, "scontrol", "show", "hostnames", list)
	if err != nil {
		return nil, err
	}
	names := strings.Fields(out)
	for _, n := range names {
		if !nodeName.MatchString(n) {
			return nil, fmt.Errorf("slurm: %.80q is no name of a node", n)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.expanded) >= maxExpanded {
		clear(c.expanded)
	}
	c.expanded[list] = names
	return names, nil
}

// layout says on which node each task of a step runs, by Slurm's own word.
func (c *client) layout(ctx context.Context, stepID string) (map[int]string, error) {
	out, err := c.run(ctx, "sattach", "--layout", stepID)
	if err != nil {
		return nil, err
	}
	return parseLayout(out), nil
}

// parseLayout reads lines as "Node 2 (n3), 2 task(s): 4 5".
func parseLayout(out string) map[int]string {
	at := map[int]string{}
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		rest, ok := strings.CutPrefix(line, "Node ")
		_, rest, open := strings.Cut(rest, "(")
		node, rest, shut := strings.Cut(rest, "), ")
		_, tasks, colon := strings.Cut(rest, "task(s):")
		if !ok || !open || !shut || !colon || !nodeName.MatchString(node) {
			continue
		}
		for _, t := range strings.Fields(tasks) {
			if n, err := strconv.Atoi(t); err == nil && n >= 0 && n < maxTasks {
				at[n] = node
			}
		}
	}
	return at
}

const (
	maxExpanded = 256
	maxTasks    = 1 << 20
)
