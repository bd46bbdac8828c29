package diagnose

import (
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

func TestMoment(t *testing.T) {
	first := time.Date(2026, 3, 1, 23, 59, 50, 0, time.Local)
	for text, want := range map[string]time.Time{
		"12s":                    first.Add(12 * time.Second),
		"1m30.5s":                first.Add(90500 * time.Millisecond),
		"23:59:55":               first.Add(5 * time.Second),
		"00:00:10":               first.Add(20 * time.Second),
		"2026-03-01T12:00:00Z":   time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC),
		"2026-03-01T12:00:00.5Z": time.Date(2026, 3, 1, 12, 0, 0, 5e8, time.UTC),
	} {
		if got, err := moment(text, first); err != nil || got != want.UnixNano() {
			t.Errorf("%s: %v, %v; want %v", text, time.Unix(0, got), err, want)
		}
	}
	if at, err := moment("", first); at != 0 || err != nil {
		t.Errorf("none: %d, %v", at, err)
	}
	if _, err := moment("soon", first); err == nil {
		t.Error("soon is a time")
	}
}

func TestOverrides(t *testing.T) {
	set, err := overrides(map[string]string{"confirm-after": "5s", "duration-factor": "2.5", "startup-ops": "7", "suspect-windows": "9"})
	if err != nil {
		t.Fatal(err)
	}
	got := diagnosis.DefaultConfig()
	set(&got)
	want := diagnosis.DefaultConfig()
	want.ConfirmAfter, want.DurationFactor, want.StartupOps, want.SuspectWindows = 5*time.Second, 2.5, 7, 9
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	for text, bad := range map[string]map[string]string{
		", confirm-after, ":        {"confirm": "1s"},
		"want a duration":          {"confirm-after": "3"},
		"want a number":            {"duration-factor": "x"},
		"0 stands for the default": {"grace": "0s"},
	} {
		if _, err := overrides(bad); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v: %v, want %q", bad, err, text)
		}
	}
}

func TestRanges(t *testing.T) {
	many := make([]int32, 0, 64)
	for i := range int32(64) {
		many = append(many, 2*i)
	}
	for want, ranks := range map[string][]int32{
		"": nil, "3": {3}, "0-3, 7, 9-10": {0, 1, 2, 3, 7, 9, 10},
		"0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, …": many,
	} {
		if got := ranges(ranks); got != want {
			t.Errorf("%v: %q, want %q", ranks, got, want)
		}
	}
}

// TestPrintable: names in a recording reach no terminal as commands.
func TestPrintable(t *testing.T) {
	var out strings.Builder
	n, err := printable{&out}.Write([]byte("rank 0 → 1 \x1b[2J\u009b\n"))
	if want := "rank 0 → 1 ?[2J?\n"; err != nil || n != len("rank 0 → 1 \x1b[2J\u009b\n") || out.String() != want {
		t.Errorf("%q, %d, %v; want %q", out.String(), n, err, want)
	}
}
