package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/lockstep-ccl/lockstep/diagnosis/replay/replaytest"
	"github.com/lockstep-ccl/lockstep/preflight"
)

// A way is how an example is played. Without one it is run as it stands, and ends with 0.
type way struct {
	where string   // the command whose help has the example
	has   string   // words that only the example has
	play           // how, beside the line
	long  bool     // begins here, and ends by itself only in make test-docs
	why   string   // it is not played, and here is why
	as    []string // what stands in its placeholders' places here, in pairs
}

// What examples end with, and are ready by.
const (
	interrupted     = 130
	noGPU           = "no usable CUDA driver"
	agentReady      = "http://127.0.0.1:9400/-/ready"
	masterReady     = "http://127.0.0.1:9402/-/ready"
	remediatorReady = "http://127.0.0.1:9410/-/ready"
	job             = "lockstep run -q --job llm --ranks 2 -- ./train"
	measured        = `(?m)^(\[0\])? +\d+ +\d+ +\w+ +\w+ +-?\d+ .*$` // a row of lockstep perf's table
)

// What is there before an example is run, because another command has made it.
const (
	authority = `test -e pki || { lockstep pki init --dir pki; for n in gpu-01 fresh; do lockstep pki agent --dir pki --node $n; done
  for m in llm master; do lockstep pki master --dir pki --job $m --host head --host $m; done
  lockstep pki remediator --dir pki; lockstep pki planner --dir pki --host planner; cp pki/ca.crt .; }; `
	initiated = `test -e pki || lockstep pki init --dir pki`
	ready     = `await() { for i in $(seq 1200); do grep -qs "$1" $2 && return; sleep 0.05; done; cat $2; exit 1; }; `
	remediate = ready + `test -e remediator.log || { lockstep remediator --token-file token --operator-token-file operator-token --master 127.0.0.1:9401 --journal j.db >remediator.log 2>&1 & await 'remediator is ready' remediator.log; }`
	training  = `test -e job.log || { lockstep run -q --job llm --ranks 6 -- ./train 0 >job.log 2>&1 & for i in $(seq 1200); do compgen -G '/dev/shm/lockstep-*/llm.5.*.rec' && break; sleep 0.05; done; }; compgen -G '/dev/shm/lockstep-*/llm.5.*.rec' || { cat job.log; exit 1; }; `
	judged    = ready + `test -e master.log || { lockstep master --job llm >master.log 2>&1 & echo $! >master.pid; await 'master is ready' master.log; lockstep agent --master 127.0.0.1:9401 >agent.log 2>&1 & await 'agent is ready' agent.log; }; `
)

// ways are those that need one. What cannot be played here is among them with the reason, and nowhere else.
var ways = []way{
	{where: "README.md", has: "make test-rdma", why: "starts a virtual machine; .ci/run does"},
	{where: "README.md", has: "make ", why: "what CI does"},
	{where: "README.md", has: "docker run", why: "takes Docker; kubernetes.md's images are made without"},
	{where: "README.md", has: "lockstep attach -- CMD", play: play{Never: "warning"}, as: []string{"CMD", job}},
	{where: "README.md", has: "lockstep run -- CMD", play: play{}, as: []string{"CMD", "./train"}},
	{where: "README.md", has: "lockstep perf allreduce --device cuda", play: play{Status: 1, Out: noGPU}},
	{where: "README.md", has: "lockstep demo --device cuda", play: play{Status: 1, Out: noGPU}},
	{where: "README.md", has: "lockstep demo --help"},
	{where: "README.md", has: "lockstep demo --on", why: "takes a cluster; make test-demo-slurm and test-demo-kubernetes play it"},
	{where: "README.md", has: "--control --hold", play: play{After: "\nfor p in $(jobs -p); do kill $p; wait $p; done"}},

	{where: "operations.md", has: "lockstep agent --share-runtime-dir", play: play{Ready: agentReady}},
	{where: "operations.md", has: "lockstep agent", play: play{Ready: agentReady}},
	{where: "operations.md", has: "lockstep master --job NAME", play: play{Ready: masterReady}, as: []string{"NAME", "llm", "DIR", "state"}},
	{where: "operations.md", has: "curl ", play: play{Before: remediate, Out: `(?m)^\[\]$`}},
	{where: "operations.md", has: "lockstep remediator --config.file FILE", as: []string{"FILE", "r.yaml"}},
	{where: "operations.md", has: "lockstep run --control --hold 30s", play: play{After: " --job llm --ranks 2 -- ./train"}},
	{where: "operations.md", has: "lockstep attach -- COMMAND", play: play{Never: "warning", After: "; while curl -s localhost:9400/-/ready || curl -s localhost:9402/-/ready; do sleep 0.1; done"}, as: []string{"COMMAND", job}},
	{where: "operations.md", has: "lockstep perf --gpu-algo …", why: "an option of comparisons on GPUs"},
	{where: "operations.md", has: "lockstep perf --gpu-pace", why: "an option of comparisons on GPUs"},
	{where: "operations.md", has: "lockstep pki agent", as: []string{"N", "n1"}},
	{where: "operations.md", has: "lockstep pki master", as: []string{"J", "llm", "H", "head"}},
	{where: "operations.md", has: "lockstep demo", why: "builds Prometheus; .ci/run plays the demo with every fault"},
	{where: "operations.md", has: "lockstep top --master", play: play{Before: judged, After: "; kill $(cat master.pid)", Out: "(?m)^llm  step"}},
	{where: "operations.md", has: "lockstep top --json", play: play{Before: "rm -rf /dev/shm/lockstep; " + training, Out: `"ranks"`}},
	{where: "operations.md", has: "lockstep breaker", play: play{Before: remediate, Status: 1, Out: `no breaker is open in scope "job:llm"`}, as: []string{"OPERATOR_FILE", "operator-token", "SCOPE", "job:llm"}},
	{where: "operations.md", has: "make ", why: "builds, or takes long; .ci/run and people do"},
	{where: "operations.md", has: "docker run", why: "an option for a container with GPUs"},
	{where: "operations.md", has: "nvidia-smi", why: "resets GPUs, and there are none"},
	{where: "operations.md", has: "ulimit", why: "what an administrator sets for the ranks' user"},

	{where: "demo", has: "--on ", why: "takes a cluster; make test-demo-slurm and test-demo-kubernetes play it"},
	{where: "demo", has: "", why: "builds Prometheus; .ci/run plays the demo with every fault"},

	{where: "attach", has: "--pki /etc/lockstep/pki", play: play{Before: authority + "cp -r pki /etc/lockstep/pki"}},
	{where: "attach", has: "--dry-run", play: play{Never: "warning"}},

	{where: "agent", has: "", play: play{Ready: agentReady}},
	{where: "master", has: "--tls.cert", play: play{Before: authority + "cp pki/master-llm.crt m.crt; cp pki/master-llm.key m.key", Ready: masterReady}},
	{where: "master", has: "--state-dir", play: play{Ready: masterReady}},

	{where: "planner", has: "planner serve", play: play{Before: authority + "cp pki/planner.crt p.crt; cp pki/planner.key p.key", Ready: "planner is ready"}},
	{where: "planner", has: "planner probe", play: play{Before: authority + "cp pki/agent-gpu-01.crt a.crt; cp pki/agent-gpu-01.key a.key", Ready: "prober is ready"}},
	{where: "planner", has: "lockstep perf", play: play{Before: ready + "lockstep planner serve --fabric fabric.json >planner.log 2>&1 & await 'planner is ready' planner.log", Ready: measured, Status: interrupted}},
	{where: "planner serve", has: "--tls.cert", play: play{Before: authority + "cp pki/planner.crt p.crt; cp pki/planner.key p.key", Ready: "planner is ready"}},
	{where: "planner serve", has: "", play: play{Ready: "planner is ready"}},
	{where: "planner probe", has: "", play: play{Before: authority + "cp pki/agent-fresh.crt a.crt; cp pki/agent-fresh.key a.key", Ready: "prober is ready"}},

	{where: "remediator", has: "--actuator kubernetes", why: "asks an API server; make test-kubernetes plays it"},
	{where: "remediator", has: "--check"},
	{where: "remediator", has: "--tls.cert", play: play{Before: authority + "cp pki/remediator.crt r.crt; cp pki/remediator.key r.key", Ready: remediatorReady}},
	{where: "remediator", has: "", play: play{Ready: remediatorReady}},
	{where: "breaker", has: "--close", play: play{Before: remediate, Status: 1, Out: `no breaker is open in scope "job:llm"`}},
	{where: "breaker", has: "", play: play{Before: remediate}},
	{where: "pki agent", has: "", play: play{Before: initiated}},
	{where: "pki master", has: "", play: play{Before: initiated}},
	{where: "pki remediator", has: "", play: play{Before: initiated}},
	{where: "pki planner", has: "", play: play{Before: initiated}},

	{where: "run", has: "--hosts 4", why: "takes four machines; script hosts plays it on one"},

	{where: "perf", has: "--device cuda", play: play{Status: 1, Out: noGPU}},
	{where: "perf", has: "", long: true, play: play{Ready: measured, Status: interrupted}},
	{where: "preflight", has: "--device cuda", play: play{Status: 1, Out: noGPU}},
	{where: "preflight", has: "lockstep run", play: play{Or: 1}}, // a rank ends with StatusBad, as below
	{where: "preflight", has: "srun ", play: play{Or: 1}},
	{where: "preflight", has: "", play: play{Or: preflight.StatusBad}}, // as a busy machine can be
	{where: "gpus", has: "| jq"},
	{where: "gpus", has: "", play: play{Status: 1, Out: "no libnvidia-ml.so.1"}},
	{where: "nics", has: "| jq"},
	{where: "nics", has: "", play: play{Status: 1, Out: "no RDMA"}},
	{where: "doctor", has: "--require gpu", play: play{Status: 3, Out: "✗ gpu"}},

	{where: "inspect", has: "/dev/shm/lockstep/llm.5", play: play{Before: training + "mkdir /dev/shm/lockstep; cp /dev/shm/lockstep-*/llm.5.*.rec /dev/shm/lockstep/llm.5.4711.rec", After: "; rm -r /dev/shm/lockstep"}},
	{where: "inspect", has: "", play: play{Before: training}},
	{where: "top", has: "--ca ca.crt", play: play{Before: authority + ready + `cat >web.yaml <<'END'
tls_server_config: {cert_file: pki/master-master.crt, key_file: pki/master-master.key}
basic_auth_users: {sre: $2a$04$Rp2/pzqOg6VhzLrv6CyaB.jRzAJalSijczyoVTtWaJNkPUfnVUPFi}
END
lockstep master --job llm --listen 127.0.0.1:9403 --web.listen-address :9402 --web.config.file web.yaml >web.log 2>&1 & await 'master is ready' web.log`}},
	{where: "top", has: "--master", play: play{Before: judged, After: "; kill $(cat master.pid)", Out: "(?m)^llm  step"}},
	{where: "top", has: "", play: play{Before: training}},
	{where: "slurm run", has: "", why: "a batch script of Slurm's; make test-slurm plays it"},
}

// given are files that examples take as given, and stand-ins for programs that are not here.
var given = map[string]string{
	"token":                     "the webhook's token, long enough\n",
	"operator-token":            "the operator's token, long enough\n",
	"train":                     "#!/bin/sh\nexec lockstep train --dp ${WORLD_SIZE:-${SLURM_NTASKS:-$OMPI_COMM_WORLD_SIZE}} --dir checkpoints --pace 20ms --steps ${1:-5}\n",
	"train.py":                  "",
	"sre.password":              "secret\n",
	"/opt/lockstep/bin/python":  "#!/bin/sh\nexec ./train\n",
	"/opt/lockstep/bin/kubectl": "#!/bin/sh\ntest \"$*\" = 'apply -f -' && grep -q '^kind:'\n",
	"/opt/lockstep/bin/torchrun": `#!/bin/bash
export WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
while [ $# -gt 1 ]; do [ $1 = --nproc-per-node ] && WORLD_SIZE=$2; shift; done
for RANK in $(seq 0 $((WORLD_SIZE - 1))); do export RANK LOCAL_RANK=$RANK; python $1 & p+=($!); done
for q in ${p[@]}; do wait $q || exit 1; done
`,
	"/opt/lockstep/bin/srun": `#!/bin/bash
while [[ $1 = --* ]]; do shift; done
export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_NTASKS=2 SLURMD_NODENAME=fresh MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & p+=($!); done
for q in ${p[@]}; do wait $q || exit 1; done
`,
	"/opt/lockstep/bin/mpirun": `#!/bin/bash
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
for i in 0 1; do OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_LOCAL_RANK=$i "$@" & p+=($!); done
for q in ${p[@]}; do wait $q || exit 1; done
`,
}

// TestExamples plays each example of each command's help on a fresh root, as a new user would: the lines
// of one command one after the other in one shell's directory.
func TestExamples(t *testing.T) {
	if testing.Short() {
		t.Skip("plays every example; the other tests run the same under the race detector")
	}
	k, err := kong.New(&cli{}, options()...)
	if err != nil {
		t.Fatal(err)
	}
	_, jqless := exec.LookPath("jq")
	files := maps.Clone(given)
	for _, n := range commandNodes(k.Model.Node) {
		for _, name := range []string{"r.yaml", "monitoring.yaml", "fabric.json"} {
			if text := fileIn(n.Detail, name); text != "" {
				files[name] = text
			}
		}
	}
	operations, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	files["rank.sh"] = regexp.MustCompile("(?s)```sh\n(#!/bin/sh\n# rank.sh.*?)```").FindStringSubmatch(string(operations))[1]
	evidence := filepath.Join(t.TempDir(), "evidence")
	recorded, err := os.ReadFile("../../diagnosis/replay/testdata/communication_slow.evidence")
	if err != nil {
		t.Fatal(err)
	}
	if recorded, err = replaytest.Retell(recorded); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(evidence, recorded, 0o644); err != nil {
		t.Fatal(err)
	}
	binds := map[string]string{"/home/adopter/FILE": evidence, "/var/lib/lockstep/llm/incidents/llm-1700000000000-1.evidence": evidence}
	examples := map[string][]string{}
	for _, d := range documents { // TestDocuments plays their fenced blocks
		examples[filepath.Base(d)] = append(indented(t, d), inline(t, d, k.Model)...)
	}
	for _, n := range commandNodes(k.Model.Node) {
		_, text, _ := strings.Cut(n.Detail, "Examples:\n")
		examples[strings.TrimPrefix(n.FullPath(), "lockstep ")] = exampleLines(text)
	}
	used := make([]bool, len(ways))
	for where, lines := range examples {
		r := root{Files: files}
		if where == "diagnose" {
			r.Binds = binds
		}
		for _, line := range lines {
			p := wayOf(where, line, used)
			if p.Line != "" && (jqless == nil || !strings.Contains(line, "| jq ")) {
				r.Plays = append(r.Plays, p)
			}
		}
		if len(r.Plays) == 0 {
			continue
		}
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			for i, wrong := range r.start(t.Context(), t) {
				if wrong != "" {
					t.Errorf("%s: %s: %s", where, r.Plays[i].Line, wrong)
				}
			}
		})
	}
	for i, w := range ways {
		if !used[i] {
			t.Errorf("no example of %s has %q any more", w.where, w.has)
		}
	}
}

// wayOf is how an example is played, without a line if it is not, and notes which of the ways is used.
func wayOf(where, line string, used []bool) play {
	for i, w := range ways {
		if w.where != where || !strings.Contains(line, w.has) {
			continue
		}
		used[i] = true
		p := w.play
		switch {
		case w.why != "":
			return play{}
		case w.long && os.Getenv("LOCKSTEP_TEST_EXAMPLES") != "":
			p = play{}
		}
		p.Line = line
		for i := 0; i < len(w.as); i += 2 {
			p.Line = regexp.MustCompile(`\b`+w.as[i]+`\b`).ReplaceAllLiteralString(p.Line, w.as[i+1])
		}
		return p
	}
	return play{Line: line}
}

// indented are a document's indented commands: line by line, or all that stand together when one of them
// goes on beside the next ones.
func indented(t *testing.T, file string) (lines []string) {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?m)^\n((?:    .*\n)+)").FindAllStringSubmatch(fences.ReplaceAllString(string(text), ""), -1) {
		var group []string
		for line := range strings.Lines(m[1]) {
			group = append(group, beside.ReplaceAllString(strings.TrimSpace(line), ""))
		}
		if strings.Contains(m[1], "&\n") {
			group = []string{strings.Join(group, "\n")}
		}
		lines = append(lines, group...)
	}
	return lines
}

// inline are the commands within a document's sentences, each once: what is quoted, begins with a program's name
// and goes on. A quoted command of lockstep's without more is a name; one that does not exist is an error, and so
// is a quoted option that no command has.
func inline(t *testing.T, file string, model *kong.Application) (lines []string) {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	flags, names := map[string]bool{}, map[string]bool{}
	for _, n := range commandNodes(model.Node) {
		names[n.FullPath()] = true
		for _, group := range n.AllFlags(false) {
			for _, f := range group {
				flags["--"+f.Name], flags["--no-"+f.Name] = true, true
			}
		}
	}
	for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(fences.ReplaceAllString(string(text), ""), -1) {
		switch line := m[1]; {
		case strings.HasPrefix(line, "--") && !flags[strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune(" =[", r) })[0]]:
			t.Errorf("%s: no command has the option `%s`", file, line)
		case names[line] || slices.Contains(lines, line) || !programs.MatchString(line):
		case strings.HasPrefix(line, "lockstep ") && strings.Count(line, " ") == 1:
			t.Errorf("%s: there is no command `%s`", file, line)
		default:
			lines = append(lines, line)
		}
	}
	return lines
}

// programs are what a command in a sentence begins with.
var programs = regexp.MustCompile(`^(\$ |[A-Z_]+=\S+ )*(lockstep|curl|make|docker|kubectl|helm|nvidia-smi|ulimit|jq|srun|sbatch|scontrol|systemctl|promtool|amtool) `)

var fences = regexp.MustCompile("(?ms)^```.*?^```$")

// commandNodes are all commands, those with commands of their own among them.
func commandNodes(n *kong.Node) (all []*kong.Node) {
	for _, c := range n.Children {
		if c.Type == kong.CommandNode && !c.Hidden {
			all = append(append(all, c), commandNodes(c)...)
		}
	}
	return all
}

// exampleLines are the command lines of a help's examples, without what is said beside them.
func exampleLines(text string) (lines []string) {
	for line := range strings.Lines(continued.ReplaceAllString(text, " ")) {
		if len(commandsOf(line)) == 0 {
			continue
		}
		line = beside.ReplaceAllString(strings.TrimSpace(line), "")
		lines = append(lines, line)
	}
	return lines
}

// fileIn is the file that a help shows under its name.
func fileIn(help, name string) (text string) {
	_, rest, ok := strings.Cut(help, "\n"+name+", ")
	if !ok {
		return ""
	}
	_, rest, _ = strings.Cut(rest, ":\n")
	rest = strings.TrimLeft(rest, "\n")
	for line := range strings.Lines(rest) {
		if !strings.HasPrefix(line, "  ") {
			break
		}
		text += line[2:]
	}
	return text
}

// beside is what stands beside a command.
var beside = regexp.MustCompile(`\s{3,}.*$|\s+# .*$`)
