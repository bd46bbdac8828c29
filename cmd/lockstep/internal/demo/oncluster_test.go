package demo

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/alecthomas/kong"
)

func parse(t *testing.T, args ...string) (*Cmd, error) {
	t.Helper()
	var c Cmd
	p, err := kong.New(&c, kong.Exit(func(int) { t.Fatal("exits") }))
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.Parse(args)
	return &c, err
}

func TestClusterFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--on slurm", ""},
		{"--on slurm --yes --once --fault rank_killed --nodes 8 --spares 0", ""},
		{"--on slurm --yes --once --fault node_lost --power-off=off_{node}", ""},
		{"--on slurm --sbatch=--partition=a,b --sbatch=--account=x", ""},
		{"--on slurm --kill master", ""},
		{"--on pigeon", "must be one of"},
		{"--on kubernetes --yes --image x --nodes 2", ""},
		{"--on kubernetes --sbatch=--x", "for --on slurm"},
		{"--on kubernetes --nodes 2 --rank 2", "ranks 0 to 1"},
		{"--yes", "are for --on"},
		{"--power-off x", "are for --on"},
		{"--on slurm --device cuda", "on CPUs"},
		{"--on slurm --trainer torch", "own trainer"},
		{"--on slurm --panels", "--panels and --tracing"},
		{"--on slurm --nodes 3", "2, 4 or 8"},
		{"--on slurm --spares 65", "0 to 64"},
		{"--on slurm --kill agent0", "want one of"},
		{"--on slurm --fault gpu_slow", "ranks on slurm have only"},
		{"--on slurm --fault node_lost --once", "--power-off"},
		{"--on slurm --fault node_lost --once --power-off reboot", "{node}"},
		{"--on slurm --fault node_lost --power-off x{node}", "--once"},
		{"--fault node_lost", "ranks on cpu have only"},
	} {
		got, err := parse(t, strings.Fields(c.args)...)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
		if err == nil && strings.Contains(c.args, "--sbatch") && len(got.Cluster.Sbatch) != 2 {
			t.Errorf("%s: options %q", c.args, got.Cluster.Sbatch)
		}
	}
}

// TestFault: an order kills the process that it names, and nothing else is taken for one.
func TestFault(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(injection{Fault: fault{Name: faultKilled, Rank: 2}, Attempt: 1, PID: cmd.Process.Pid, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	if err := (&FaultCmd{Order: string(b)}).Run(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signal() != syscall.SIGKILL {
		t.Errorf("ended by %v", ws)
	}
	for _, order := range []string{"", "{}", `{"PID":1,"Dir":"/tmp"}`, `{"PID":-1,"Dir":"/tmp","Fault":{"Name":"rank_killed"}}`, `{"PID":4194303,"Dir":"x"}`, `{"Clean":true,"Dir":"/tmp"}`, `{"Clean":true,"Dir":"/dev/shm/lockstep-demo-1/../../../tmp"}`} {
		if err := (&FaultCmd{Order: order}).Run(); err == nil {
			t.Errorf("%q is no order, and was carried out", order)
		}
	}
}

func TestPower(t *testing.T) {
	var cl cluster
	if err := cl.power(t.Context(), `test {node} = 'n; 1'`, "n; 1"); err != nil {
		t.Error(err)
	}
	if err := cl.power(t.Context(), "echo no such node; false", "n1"); err == nil || !strings.Contains(err.Error(), "no such node") {
		t.Errorf("%v", err)
	}
}

// TestNothingIsDone: without --yes the plan is told, and nothing but questions is asked.
func TestNothingIsDone(t *testing.T) {
	m := &slurmModel{}
	c, err := parse(t, "--on", "slurm")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	s := &slurmSite{job: "j", dir: "/d", shape: shape{dp: 2, tp: 2, pp: 2, nodes: 4}, spares: 1, run: m.run, user: "alice", version: "22.05", cluster: "lab"}
	err = c.ask(&printer{w: &out}, s)
	if err == nil || !strings.Contains(err.Error(), "add --yes") || len(m.calls) != 0 {
		t.Errorf("%v, calls %q", err, m.calls)
	}
	for _, want := range []string{"Slurm cluster lab", "sbatch --job-name=j --nodes=5", "user alice", "no node is drained", "scancel"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the plan lacks %q:\n%s", want, out.String())
		}
	}
	c.Cluster.Yes = true
	if err := c.ask(&printer{w: &out}, s); err != nil {
		t.Error(err)
	}
}
