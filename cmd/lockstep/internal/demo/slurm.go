package demo

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	remediationslurm "github.com/lockstep-ccl/lockstep/remediation/slurm"
)

// slurmSite is a Slurm cluster, used through its commands as any user does: one batch job has
// ranks and agents in its allocation.
type slurmSite struct {
	job     string // its name
	dir     string // on a file system that this machine and the nodes share
	shape   shape
	spares  int
	requeue bool     // instead of restarts inside the allocation
	options []string // of sbatch
	address string   // of this machine, "" to find it
	wait    time.Duration
	pace    time.Duration
	run     func(ctx context.Context, name string, args ...string) (string, error)
	say     func(format string, args ...any)

	user    string
	version string
	cluster string
	id      string // of the batch job
	known   []string
	stop    context.CancelFunc
	watched chan struct{}
}

// slurmCommand runs one of Slurm's commands. Variables of an allocation that the demo itself is
// in would be taken for the job's.
func slurmCommand(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "SLURM_") && !strings.HasPrefix(kv, "SLURM_CONF=") || strings.HasPrefix(kv, "SBATCH_")
	})
	cmd.WaitDelay = time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

var (
	slurmNode = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$`)
	slurmID   = regexp.MustCompile(`^[0-9]+$`)
)

// check asks who is there, and whether so many nodes are.
func (s *slurmSite) check(ctx context.Context) error {
	for _, p := range []string{"sinfo", "sbatch", "srun", "squeue", "scancel", "scontrol"} {
		if _, err := exec.LookPath(p); err != nil {
			return fmt.Errorf("--on slurm: %w: this is for a machine with Slurm's commands, such as a login node", err)
		}
	}
	u, err := user.Current()
	if err != nil {
		return err
	}
	s.user = u.Username
	version, err := s.run(ctx, "sinfo", "--version")
	if err != nil {
		return fmt.Errorf("--on slurm: %w", err)
	}
	out, err := s.run(ctx, "sinfo", "-h", "-o", "%D %t %P")
	if err != nil {
		return fmt.Errorf("--on slurm: slurmctld does not answer: %w", err)
	}
	nodes, idle, err := slurmNodes(out)
	if err != nil {
		return err
	}
	if want := s.shape.nodes + s.spares; nodes < want {
		return fmt.Errorf("--on slurm: no partition has %d nodes that work (the largest has %d): choose --nodes and --spares", want, nodes)
	}
	s.version = fmt.Sprintf("%s, %d nodes, %d idle", strings.TrimPrefix(version, "slurm "), nodes, idle)
	if conf, err := s.run(ctx, "scontrol", "show", "config"); err == nil {
		s.cluster = setting(conf, "ClusterName")
	}
	return nil
}

// setting finds one in scontrol's list.
func setting(list, name string) string {
	for l := range strings.Lines(list) {
		if k, v, ok := strings.Cut(l, "="); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// slurmNodes counts the working and the idle nodes of the largest partition in sinfo's "%D %t %P".
func slurmNodes(out string) (works, idle int, err error) {
	all, free := map[string]int{}, map[string]int{}
	for l := range strings.Lines(out) {
		f := strings.Fields(l)
		if len(f) != 3 {
			return 0, 0, fmt.Errorf("--on slurm: sinfo says %q, want number, state and partition of nodes", strings.TrimSpace(l))
		}
		n, err := strconv.Atoi(f[0])
		if err != nil {
			return 0, 0, fmt.Errorf("--on slurm: sinfo says %q, want a number of nodes first", strings.TrimSpace(l))
		}
		switch state, partition := f[1], f[2]; {
		case strings.HasSuffix(state, "*"): // does not answer
		case state == "idle":
			free[partition] += n
			fallthrough
		case state == "alloc", state == "mix", state == "comp":
			all[partition] += n
		}
	}
	for p, n := range all {
		if n > works || n == works && free[p] > idle {
			works, idle = n, free[p]
		}
	}
	return works, idle, nil
}

func (s *slurmSite) where() string {
	return fmt.Sprintf("%d nodes of Slurm cluster %s (%s), and %d spare", s.shape.nodes, cmp.Or(s.cluster, "?"), s.version, s.spares)
}

func (s *slurmSite) plan() []string {
	restart := "restart its steps inside the allocation"
	if s.requeue {
		restart = "requeue it, on other nodes where one is left out"
	}
	return []string{
		fmt.Sprintf("submit one batch job as user %s: sbatch %s", s.user, strings.Join(s.sbatch(), " ")),
		fmt.Sprintf("run in it %d ranks on %d nodes, %d spare for the node that is left out, and an agent a node", s.shape.world(), s.shape.nodes, s.spares),
		"break ranks of this job, and let the remediator " + restart + "; no node is drained, and no other job is touched",
		"listen on this machine for the agents, with certificates of this run's own; all other parts run here, on loopback",
		fmt.Sprintf("keep logs, checkpoints and this program in %s, which the nodes must see by this name, and /dev/shm/%s on each node", s.dir, s.job),
		"remove all of it in the end (scancel)",
	}
}

func (s *slurmSite) sbatch() []string {
	nodes := s.shape.nodes + s.spares
	if s.requeue {
		nodes = s.shape.nodes
	}
	return append([]string{
		"--job-name=" + s.job, fmt.Sprintf("--nodes=%d", nodes), fmt.Sprintf("--ntasks-per-node=%d", s.shape.world()/s.shape.nodes),
		"--exclusive", "--no-kill", "--requeue", "--open-mode=append", "--time=60",
	}, s.options...)
}

func (s *slurmSite) traits() traits { return traits{spares: true} }

func (s *slurmSite) actuator() []string {
	return []string{"--actuator", "slurm", "--slurm.user", s.user, "--slurm.journal", filepath.Join(s.dir, "slurm")}
}

// prepare finds the address from which this machine speaks to the nodes.
func (s *slurmSite) prepare(ctx context.Context) (string, error) {
	if s.address != "" {
		return s.address, nil
	}
	out, err := s.run(ctx, "scontrol", "-o", "show", "node")
	if err != nil {
		return "", fmt.Errorf("which address nodes reach this machine by: %w (or say --address)", err)
	}
	for f := range strings.FieldsSeq(out) {
		if to, ok := strings.CutPrefix(f, "NodeAddr="); ok {
			return towards(ctx, to)
		}
	}
	return "", errors.New("which address nodes reach this machine by: scontrol names no NodeAddr: say --address")
}

// towards is this machine's own address on the route to another; nothing is sent.
func towards(ctx context.Context, to string) (string, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "udp", net.JoinHostPort(to, "9"))
	if err != nil {
		return "", fmt.Errorf("which address %s reaches this machine by: %w (or say --address)", to, err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).IP.String(), nil
}

// submit writes the job's scripts, hands it in, and waits until it has its nodes.
func (s *slurmSite) submit(ctx context.Context, c *cluster, certs certs) error {
	if err := copyFile(filepath.Join(s.dir, "lockstep"), c.self, 0o700); err != nil {
		return err
	}
	if _, err := secret(filepath.Join(s.dir, "secret")); err != nil {
		return err
	}
	for name, text := range s.scripts(c) {
		if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o700); err != nil {
			return err
		}
	}
	args := append(s.sbatch(), "--parsable", "--output="+filepath.Join(s.dir, "log", "job.log"), filepath.Join(s.dir, "job.sh"))
	out, err := s.run(ctx, "sbatch", args...)
	if err != nil {
		return err
	}
	s.id, _, _ = strings.Cut(out, ";")
	if !slurmID.MatchString(s.id) {
		return fmt.Errorf("sbatch says %q, want a job's id", out)
	}
	waiting, cancel := context.WithTimeout(ctx, s.wait)
	defer cancel()
	for last := ""; ; {
		state, nodes, err := s.look(waiting)
		if err == nil && state == "RUNNING" {
			if err := s.admit(certs, nodes); err != nil {
				return err
			}
			break
		}
		if err == nil && state != last && state != "CONFIGURING" {
			s.say("slurm job %s: %s", s.id, state)
			last = state
		}
		if over(state) {
			return fmt.Errorf("slurm job %s is %s:\n%s", s.id, state, tail(filepath.Join(s.dir, "log", "job.log")))
		}
		if !sleep(waiting, 200*time.Millisecond) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("slurm job %s has no nodes after %v (%s): wait longer with --wait", s.id, s.wait, cmp.Or(state, "squeue does not answer"))
		}
	}
	follow, stop := context.WithCancel(context.Background())
	s.stop, s.watched = stop, make(chan struct{})
	go func() {
		defer close(s.watched)
		s.follow(follow, c, certs)
	}()
	return nil
}

// follow sees a requeued job get other nodes, and a job that ends.
func (s *slurmSite) follow(ctx context.Context, c *cluster, certs certs) {
	for sleep(ctx, time.Second) {
		state, nodes, err := s.look(ctx)
		if err != nil {
			continue // slurmctld may be away for a while
		}
		if state == "RUNNING" {
			err = s.admit(certs, nodes)
		} else if over(state) {
			err = fmt.Errorf("slurm job %s ended by itself: %s\n%s", s.id, state, tail(filepath.Join(s.dir, "log", "job.log")))
		}
		if err != nil {
			select {
			case c.died <- err:
			default:
			}
			return
		}
	}
}

// look asks Slurm for the job's state and its nodes, as Slurm folds them.
func (s *slurmSite) look(ctx context.Context) (state, nodes string, err error) {
	out, err := s.run(ctx, "squeue", "-h", "-t", "all", "-j", s.id, "-o", "%T|%N")
	if err != nil {
		return "", "", err
	}
	state, nodes, _ = strings.Cut(out, "|")
	return state, strings.TrimSpace(nodes), nil
}

func over(state string) bool {
	return state != "" && !slices.Contains([]string{"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED", "REQUEUE_HOLD"}, state)
}

// admit issues the certificates of nodes whose agents wait for them.
func (s *slurmSite) admit(certs certs, folded string) error {
	if folded == "" || slices.Contains(s.known, folded) {
		return nil
	}
	out, err := s.run(context.Background(), "scontrol", "show", "hostnames", folded)
	if err != nil {
		return err
	}
	for node := range strings.FieldsSeq(out) {
		if !slurmNode.MatchString(node) {
			return fmt.Errorf("slurm has a node named %.80q, which no certificate can name", node)
		}
		if slices.Contains(s.known, node) {
			continue
		}
		if err := certs.agentCert(node); err != nil {
			return err
		}
		s.known = append(s.known, node)
	}
	s.known = append(s.known, folded)
	return nil
}

// canLose: the batch script goes down with its host, and then Slurm itself requeues the job,
// after SlurmdTimeout.
func (s *slurmSite) canLose(ctx context.Context, node string) error {
	host, err := s.run(ctx, "squeue", "-h", "-j", s.id, "-o", "%B")
	if err == nil && host == node {
		err = fmt.Errorf("node_lost: %s has the batch script: choose a --rank that is not on the job's first node", node)
	}
	return err
}

// nodes are the youngest attempt's: lockstep slurm run names its steps by them, and without it the
// job has no others.
func (s *slurmSite) nodes(ctx context.Context) ([]string, error) {
	if s.requeue {
		state, folded, err := s.look(ctx)
		if err != nil || state != "RUNNING" {
			return nil, err
		}
		out, err := s.run(ctx, "scontrol", "show", "hostnames", folded)
		return strings.Fields(out), err
	}
	out, err := s.run(ctx, "squeue", "-h", "-s", "-j", s.id, "-o", "%j|%N")
	if err != nil {
		return nil, err
	}
	newest, folded := -1, ""
	for l := range strings.Lines(out) {
		name, on, _ := strings.Cut(strings.TrimSpace(l), "|")
		number, ok := strings.CutPrefix(name, remediationslurm.StepPrefix)
		if n, err := strconv.Atoi(number); ok && err == nil && n > newest {
			newest, folded = n, on
		}
	}
	if newest < 0 {
		return nil, nil
	}
	out, err = s.run(ctx, "scontrol", "show", "hostnames", folded)
	return strings.Fields(out), err
}

// exec runs lockstep as a step of its own in the job's allocation.
func (s *slurmSite) exec(ctx context.Context, node string, args ...string) error {
	step := []string{"--jobid=" + s.id, "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--mem=0", "--nodelist=" + node, "--job-name=fault", filepath.Join(s.dir, "lockstep")}
	_, err := s.run(ctx, "srun", append(step, args...)...)
	return err
}

// remove cancels the job and waits until Slurm has let its nodes go.
func (s *slurmSite) remove() {
	if s.stop != nil {
		s.stop()
		<-s.watched
		s.stop = nil
	}
	if s.id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for range 3 { // also when slurmctld is away for a moment
		if _, err := s.run(ctx, "scancel", s.id); err == nil {
			break
		}
		sleep(ctx, time.Second)
	}
	for {
		state, _, err := s.look(ctx)
		if err == nil && (over(state) || state == "") {
			s.id = ""
			return
		}
		if !sleep(ctx, 200*time.Millisecond) {
			s.say("slurm job %s has not ended after a minute (%s): scancel %s", s.id, cmp.Or(state, "squeue does not answer"), s.id)
			s.id = ""
			return
		}
	}
}

// scripts are the batch job and what its steps run.
func (s *slurmSite) scripts(c *cluster) map[string]string {
	fill := strings.NewReplacer(
		"@DIR@", quoted(s.dir), "@JOB@", s.job, "@NODES@", strconv.Itoa(s.shape.nodes), "@TASKS@", strconv.Itoa(s.shape.world()), "@EACH@", strconv.Itoa(s.shape.world()/s.shape.nodes),
		"@LEASE@", fenceLease, "@MASTER@", quoted(s.job+"="+c.masterGRPC), "@TRAIN@", quotedAll(c.trainCommand(s.shape, filepath.Join(s.dir, "train"), 0, c.pace)[1:]),
	)
	step := loopStep
	if s.requeue {
		step = requeuedStep
	}
	return map[string]string{"job.sh": fill.Replace(jobScript + step), "agent.sh": fill.Replace(agentScript), "rank.sh": fill.Replace(rankScript)}
}

// quoted is a word for the shell.
func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func quotedAll(words []string) string {
	q := make([]string, len(words))
	for i, w := range words {
		q[i] = quoted(w)
	}
	return strings.Join(q, " ")
}

const (
	jobScript = `#!/bin/sh
# Written by lockstep demo --on slurm: agents beside, then the job's steps, again when the remediator says so.
for n in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --mem=0 --no-kill --nodelist="$n" --job-name=agent @DIR@/agent.sh &
done
`
	loopStep = `exec @DIR@/lockstep slurm run --nodes @NODES@ -- --mem=0 --ntasks=@TASKS@ --ntasks-per-node=@EACH@ @DIR@/rank.sh
`
	// A job that has ended cannot be requeued: what is left of a failed step waits for that.
	requeuedStep = `srun --mem=0 --ntasks=@TASKS@ --ntasks-per-node=@EACH@ --kill-on-bad-exit=0 --wait=60 --no-kill @DIR@/rank.sh || { s=$?; sleep 60; exit $s; }
`
	// The certificate comes when it is known that this node has the job.
	agentScript = `#!/bin/sh
umask 077
run=/dev/shm/@JOB@/$SLURMD_NODENAME cert=@DIR@/pki/agent-$SLURMD_NODENAME
mkdir -p "$run"
trap 'kill $! 2>/dev/null; wait; rm -rf "$run"; rmdir /dev/shm/@JOB@ 2>/dev/null; exit 0' TERM INT
until [ -s "$cert.crt" ] && [ -s "$cert.key" ]; do sleep 0.2; done
@DIR@/lockstep agent --node "$SLURMD_NODENAME" --runtime-dir "$run" --master @MASTER@ --web.listen-address 127.0.0.1:0 \
  --tls.cert "$cert.crt" --tls.key "$cert.key" --tls.ca @DIR@/pki/ca.crt >>@DIR@/log/agent-"$SLURMD_NODENAME".log 2>&1 &
wait
`
	// Rank 0 is on the step's first node, which is another one when a node is left out.
	rankScript = `#!/bin/sh
umask 077
run=/dev/shm/@JOB@/$SLURMD_NODENAME
first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol -o show node "$first" | tr ' ' '\n' | sed -n 's/^NodeAddr=//p')
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 90 * 100 + SLURM_RESTART_COUNT % 50 * 2))
export LOCKSTEP_JOB=@JOB@ LOCKSTEP_NODE="$SLURMD_NODENAME" LOCKSTEP_RUNTIME_DIR="$run" LOCKSTEP_FAULT_DIR="$run/faults"
export LOCKSTEP_SECRET_FILE=@DIR@/secret LOCKSTEP_FENCE=stop LOCKSTEP_FENCE_LEASE=@LEASE@ LOCKSTEP_FENCE_GRACE=0s LOCKSTEP_NET=tcp
mkdir -p "$run/faults"
exec @DIR@/lockstep @TRAIN@
`
)

func copyFile(to, from string, mode os.FileMode) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
