package fence

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

const childEnv = "LOCKSTEP_TEST_FENCE_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		os.Exit(writeOnAndOn(dir))
	}
	os.Exit(m.Run())
}

// writeOnAndOn is a rank that makes checkpoints for as long as it may.
func writeOnAndOn(dir string) int {
	f, err := FromEnv(dir)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("began")
	for i := 0; ; i++ {
		err := f.WriteFile(fmt.Sprintf("step-%d/rank0", i), []byte(f.Token().String()))
		if err == nil {
			err = f.WriteFile("latest", []byte(f.Token().String()))
		}
		if err == nil && i > 3 {
			err = f.Remove(fmt.Sprintf("step-%d", i-3))
		}
		if errors.Is(err, ErrHeld) {
			fmt.Println("held")
			return 0
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
	}
}

// TestACutOffRankComesBack: a real process is stopped anywhere in its writing, another attempt
// begins, and it goes on.
func TestACutOffRankComesBack(t *testing.T) {
	dir := memory(t)
	var last uint64
	for round := range 10 {
		old := New(round, last)
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+dir, Env+"="+old.String())
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		defer cmd.Process.Kill()
		lines := bufio.NewScanner(out)
		if !lines.Scan() || lines.Text() != "began" {
			t.Fatalf("round %d: %q", round, lines.Text())
		}
		time.Sleep(time.Duration(rand.IntN(5000)) * time.Microsecond)
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		var ws syscall.WaitStatus
		if _, err := syscall.Wait4(cmd.Process.Pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
			t.Fatalf("not stopped: %v, %v", ws, err)
		}
		later := mustOpen(t, dir, New(round, old.Generation))
		last = later.Token().Generation
		before := published(t, dir)
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		var rest []string
		for lines.Scan() {
			rest = append(rest, lines.Text())
		}
		if err := cmd.Wait(); err != nil || len(rest) == 0 || rest[0] != "held" {
			t.Errorf("round %d: %v: %s", round, err, strings.Join(rest, "\n"))
		}
		if after := published(t, dir); fmt.Sprint(after) != fmt.Sprint(before) {
			t.Errorf("round %d: %v became %v", round, before, after)
		}
		if err := later.Remove("latest"); err != nil {
			t.Error(err)
		}
	}
}
