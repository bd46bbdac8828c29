package fabric_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/fabric"
	"github.com/lockstep-ccl/lockstep/pathplan"
)

// TestBadLinks: of links that lose everything or one packet in a hundred, one to three at
// random places, the planner's probes find all, and no other, and see that they are well again.
func TestBadLinks(t *testing.T) {
	long(t)
	s := shape(4, 1000)
	s.Spines = number("SPINES", 4)
	b := setUp(t, s)
	file := filepath.Join(b.dir, "fabric.json")
	enc, _ := json.Marshal(b.up.Fabric())
	must(t, os.WriteFile(file, enc, 0o600))
	addr := net.JoinHostPort(b.up.PlannerAddr().String(), "9411")
	p, out := b.process(b.up.Management(), role{Kind: "planner", Planner: addr, Fabric: file, Prints: true})
	defer func() {
		_ = p.Process.Kill()
		_ = p.Wait()
	}()
	b.probers(addr)
	said := make(chan string, 1000)
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			said <- lines.Text()
		}
	}()
	bad := map[string]bool{} // as the planner has it
	hear := func(until func() bool, most time.Duration) {
		for end := time.After(most); !until(); {
			select {
			case line := <-said:
				var name string
				var down bool
				var loss float64
				if _, err := fmt.Sscan(line, &name, &down, &loss); err != nil {
					t.Errorf("%q: %v", line, err)
				}
				bad[name] = down || loss > 0
				if !bad[name] {
					delete(bad, name)
				}
			case <-end:
				return
			}
		}
	}
	hear(func() bool { return false }, 10*time.Second)
	if len(bad) > 0 {
		t.Fatalf("%v are bad, and all are well", bad)
	}
	r := rand.New(rand.NewPCG(uint64(number("SEED", 1)), 1))
	for round := range number("ROUNDS", 12) {
		share := []float64{1, 0.01}[round%2]
		want := map[string]bool{}
		var well []func() error
		for len(want) < 1+round/2%3 {
			leaf, spine, up := r.IntN(4), r.IntN(s.Spines), r.IntN(2) == 0
			l := pathplan.Link{From: fabric.LeafName(leaf), To: fabric.SpineName(spine)}
			if !up {
				l = l.Reverse()
			}
			if want[l.String()] {
				continue
			}
			want[l.String()] = true
			f, err := b.up.Lose(leaf, spine, up, share)
			must(t, err)
			well = append(well, f)
		}
		same := func() bool {
			for l := range want {
				if !bad[l] {
					return false
				}
			}
			return len(bad) == len(want)
		}
		began := time.Now()
		hear(same, time.Minute)
		took := time.Since(began)
		hear(func() bool { return false }, 5*time.Second) // nobody else is blamed
		if t.Logf("%v lose %v: found in %v", want, share, took.Round(100*time.Millisecond)); !same() {
			t.Errorf("%v are bad, want %v", bad, want)
		}
		for _, f := range well {
			must(t, f())
		}
		began = time.Now()
		hear(func() bool { return len(bad) == 0 }, time.Minute)
		t.Logf("well again after %v", time.Since(began).Round(100*time.Millisecond))
	}
}
