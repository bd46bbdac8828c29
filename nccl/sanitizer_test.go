package nccl_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// LOCKSTEP_NCCL_LONG makes what follows longer: `make sanitize-nccl`.
var long = os.Getenv("LOCKSTEP_NCCL_LONG") != ""

var sanitizers = []flavour{
	{"thread", []string{"-fsanitize=thread", "-Wno-tsan", "-O1"}, []string{"TSAN_OPTIONS=halt_on_error=1"}},
	{"address", []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1"}, []string{"ASAN_OPTIONS=detect_leaks=0"}},
}

func needSanitizer(t *testing.T, f flavour) {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler: cc is not in PATH")
	}
	bin := filepath.Join(t.TempDir(), "probe")
	cmd := exec.Command(cc, append(f.flags, "-x", "c", "-", "-o", bin)...)
	cmd.Stdin = strings.NewReader("int main(void) { return 0; }\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("no sanitizer: cc %v: %v\n%s", f.flags, err, out)
	}
	if out, err := exec.Command(bin).CombinedOutput(); err != nil {
		t.Skipf("the sanitizer does not run here: %v\n%s", err, out)
	}
}

func TestSanitizers(t *testing.T) {
	scenes := []string{"pipes", "peers", "net", "late", "lost", "forks", "crowd"}
	vs, sampled := []string{"5"}, []string{"tight", "waking"}
	if long {
		scenes = append(scenes, "basic", "fused", "p2p", "graph", "symmetric", "hang", "threads", "many", "twice", "stale", "endless", "copies")
		// Without a set of their own: which kernels are asked for changes all the time.
		sampled = append(sampled, "tight", "stuck", "blind", "threads", "pipes", "selves", "selfish")
		vs = versions
	}
	for _, f := range sanitizers {
		t.Run(f.name, func(t *testing.T) {
			needSanitizer(t, f)
			for _, v := range vs {
				for _, s := range scenes {
					play(t, f, t.TempDir(), []string{"LOCKSTEP_NCCL_EVENTS=all"}, v, s)
				}
				for _, s := range sampled {
					play(t, f, t.TempDir(), nil, v, s)
				}
			}
			events := "200000"
			if long {
				events = "20000000"
			}
			play(t, f, t.TempDir(), nil, "5", "soak", events, "4")
		})
	}
}

// calls plays bytes as calls; the plugin is to survive any.
func calls(tb testing.TB, f flavour, version string, in []byte) {
	tb.Helper()
	cmd := command(tb, f, tb.TempDir(), []string{"LOCKSTEP_NCCL_EVENTS=all"}, version, "fuzz")
	cmd.Stdin = bytes.NewReader(in)
	if out, err := cmd.CombinedOutput(); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			tb.Fatalf("v%s: %v\n%s", version, err, out)
		}
		tb.Fatal(err)
	}
}

// Calls in an order that NCCL never makes, with words that it never says.
func TestAnyCalls(t *testing.T) {
	f := sanitizers[1]
	needSanitizer(t, f)
	rounds := 8
	if long {
		rounds = 400
	}
	r := rand.New(rand.NewPCG(1, 2))
	for i := range rounds {
		in := make([]byte, 1<<16)
		for k := range in {
			in[k] = byte(r.Uint32())
		}
		calls(t, f, versions[i%4], in)
	}
}

func FuzzCalls(f *testing.F) {
	f.Add([]byte{0, 1, 2, 5, 1, 1, 9, 0, 3, 4})
	f.Fuzz(func(t *testing.T, in []byte) { calls(t, sanitizers[1], versions[len(in)%4], in) })
}
