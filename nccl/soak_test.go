package nccl_test

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Events by the million while a reader follows: memory stays flat, and every operation
// is recorded or counted. LOCKSTEP_NCCL_SOAK says how many; `make soak-nccl`.
func TestSoak(t *testing.T) {
	for _, events := range []string{"net", "default"} { // every operation timed, and one in 32
		t.Run(events, func(t *testing.T) { soak(t, events) })
	}
}

func soak(t *testing.T, set string) {
	events := uint64(2_000_000)
	if s := os.Getenv("LOCKSTEP_NCCL_SOAK"); s != "" {
		var err error
		if events, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	cmd := command(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=" + set}, "5", "soak", fmt.Sprint(events), "2")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var memory []int
	var numbered, played uint64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var part, kib int
			if n, _ := fmt.Sscanf(lines.Text(), "part %d memory_kib=%d", &part, &kib); n == 2 {
				memory = append(memory, kib)
			}
			fmt.Sscanf(lines.Text(), "total numbered=%d events=%d", &numbered, &played)
		}
	}()
	var r *record.Reader
	for r == nil && time.Since(begin) < time.Minute {
		if paths, _ := record.List(dir); len(paths) == 1 {
			if r, err = record.Open(paths[0]); err != nil {
				t.Fatal(err)
			}
			defer r.Close()
		}
	}
	if r == nil {
		t.Fatal("no recorder")
	}
	buf := make([]record.Record, 4096)
	var ends uint64
	drain := func() {
		for n := r.Next(buf); n > 0; n = r.Next(buf) {
			for i := range buf[:n] {
				if buf[i].Kind == record.KindEnd {
					ends++
				}
			}
		}
	}
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		case <-time.After(time.Millisecond):
		}
		drain()
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	drain()
	h := r.Header()
	if r.Read()+r.Lost() != h.Appended {
		t.Errorf("records: %d read + %d lost of %d", r.Read(), r.Lost(), h.Appended)
	}
	// An operation is three records: it was called, it began, it ended. One that was not timed has no second one.
	least := 3 * (numbered - h.OpsLost)
	if set == "default" {
		least -= numbered - h.OpsLost
	}
	if h.Appended < least || h.Appended > 3*(numbered-h.OpsLost) || h.OpsUnseen != 0 || numbered == 0 {
		t.Errorf("%d operations played, %d lost by the plugin, %d records", numbered, h.OpsLost, h.Appended)
	}
	for _, s := range r.Comms(nil) {
		if s.State != record.CommLeft || s.Ops != s.Enqueued || set == "net" && s.Finished != s.Enqueued {
			t.Errorf("%s: finished %d of %d", s.Name, s.Finished, s.Enqueued)
		}
	}
	if len(memory) != 10 || memory[9]-memory[2] > 1024 {
		t.Errorf("memory of the driver after each tenth, KiB: %v", memory)
	}
	t.Logf("%d events, %d operations in %v: %d ends read, %d records overwritten unread, %d operations lost by the plugin, %d unseen; memory %v KiB",
		played, numbered, time.Since(begin).Round(time.Millisecond), ends, r.Lost(), h.OpsLost, h.OpsUnseen, memory)
}
