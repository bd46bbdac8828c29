package record_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// A process in a container is found by another pid than it has there.
func TestProcessInAContainer(t *testing.T) {
	if dir := os.Getenv("LOCKSTEP_TEST_CONTAINED"); dir != "" {
		fmt.Printf("path=%s\n", create(t, record.Options{Dir: dir, RingSlots: 64}).Path())
		os.Stdin.Read(make([]byte, 1))
		return
	}
	container := []string{"--pid", "--fork", "--kill-child", "--mount-proc"}
	if out, err := exec.Command("unshare", append(container, "true")...).CombinedOutput(); err != nil {
		t.Skipf("no PID namespace of its own can be made here: %v: %s", err, out)
	}
	cmd := exec.Command("unshare", append(container, os.Args[0], "-test.run=^TestProcessInAContainer$")...)
	cmd.Env = append(os.Environ(), "LOCKSTEP_TEST_CONTAINED="+t.TempDir())
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r := started(t, cmd)
	pid, alive := r.Process()
	if inner := int(r.Header().PID); !alive || pid == inner {
		t.Errorf("process %d of the container is %d, alive %v", inner, pid, alive)
	}
	stdin.Close()
	cmd.Wait()
	if pid, alive := r.Process(); alive {
		t.Errorf("process %d lives after its end", pid)
	}
}

// started starts a process that prints path= and where its recorder is, and opens that.
func started(t *testing.T, cmd *exec.Cmd) *record.Reader {
	t.Helper()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var path string
	for lines := bufio.NewScanner(stdout); path == "" && lines.Scan(); {
		_, path, _ = strings.Cut(lines.Text(), "path=")
	}
	return open(t, path)
}

// A process killed in the middle of appending leaves a file that can be read.
func TestKilledProcess(t *testing.T) {
	if dir := os.Getenv("LOCKSTEP_TEST_KILLED"); dir != "" {
		w := create(t, record.Options{Dir: dir, RingSlots: 64})
		fmt.Printf("path=%s\n", w.Path())
		for i := uint64(1); ; i++ {
			w.Append(&record.Record{Kind: record.KindMark, Seq: i, Value: ^i})
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledProcess$")
	cmd.Env = append(os.Environ(), "LOCKSTEP_TEST_KILLED="+t.TempDir())
	r := started(t, cmd)
	for r.Header().Appended < 1000 {
		runtime.Gosched()
	}
	if !r.Alive() {
		t.Error("not alive before the kill")
	}
	cmd.Process.Kill()
	cmd.Wait()
	if h := r.Header(); r.Alive() || h.Closed {
		t.Errorf("alive %v, closed %v after the kill", r.Alive(), h.Closed)
	}
	buf := make([]record.Record, 100)
	n := r.Next(buf)
	for _, got := range buf[:n] {
		if got.Value != ^got.Seq || got.Seq != got.Ticket+1 {
			t.Errorf("torn record %+v", got)
		}
	}
	if n < 63 || r.Read()+r.Lost()+uint64(r.Pending()) != r.Header().Appended {
		t.Errorf("read %d + lost %d + pending %d of %d", n, r.Lost(), r.Pending(), r.Header().Appended)
	}
}
