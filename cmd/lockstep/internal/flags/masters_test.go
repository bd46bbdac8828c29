package flags

import (
	"strings"
	"testing"
)

func TestMasters(t *testing.T) {
	of, err := Masters([]string{"llm=10.0.0.5:9401", "lockstep-master-{job}:9401"})
	if err != nil {
		t.Fatal(err)
	}
	for job, want := range map[string]string{
		"llm":                   "10.0.0.5:9401",
		"other-1":               "lockstep-master-other-1:9401",
		"evil.example:80/x?":    "", // an address is not made of what somebody wrote
		"a.b":                   "",
		"":                      "",
		strings.Repeat("a", 64): "",
	} {
		if got := of(job); got != want {
			t.Errorf("%q: %q, want %q", job, got, want)
		}
	}
	for _, bad := range [][]string{{"10.0.0.5"}, {"a:1", "b:1"}, {"llm=host"}} {
		if _, err := Masters(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestDial(t *testing.T) {
	for addr, ok := range map[string]bool{"": true, "h:1": true, "[::1]:9400": true, "h": false, "h:0": false, "h:99999": false, ":9400": false, "h:http": false} {
		if err := Dial("planner", addr); (err == nil) != ok {
			t.Errorf("%q: %v", addr, err)
		}
	}
}
