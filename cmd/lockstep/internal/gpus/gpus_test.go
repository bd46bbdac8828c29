package gpus

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

func example() *seen {
	v := func(x float64) *float64 { return &x }
	cap := diagnosis.ThrottlePowerCap
	return &seen{
		GPUs: &collector.GPUs{DriverVersion: "580.95.05", ProbeNs: 42e6, GPUs: []collector.GPU{
			{
				Index: 0, UUID: "GPU-0", Model: "NVIDIA H200", BusID: "00000000:18:00.0", Temperature: v(61), Power: v(650.4), PowerLimit: v(700), SMClock: v(1.98e9),
				Utilization: v(0.98), MemoryUsed: v(10 << 30), MemoryTotal: v(140 << 30), PCIeGeneration: v(5), PCIeWidth: v(16),
				Uncorrected: collector.ECC{Volatile: v(0)}, RowsCorrected: v(1), RowsUncorrected: v(2), RemapPending: v(1), RemapFailure: v(0), Throttle: &cap,
				Links: []collector.NVLink{{Link: 0, Up: true, CRC: v(4), Replays: v(3), Recoveries: v(0)}, {Link: 1, Replays: v(1)}},
			},
			{Index: 1, Model: "NVIDIA H200", BusID: "00000000:2A:00.0", Power: v(90), Failed: []string{"GetClockInfo: Unknown Error"}},
			{Index: 2, Model: "NVIDIA H200", Lost: true},
		}},
		Ranks: []rank{{"llm", 4, 77, 0}, {"llm", 5, 78, 0}},
	}
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	if err := example().print(&b); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, l := range strings.Split(strings.TrimSpace(b.String()), "\n") {
		lines = append(lines, strings.Join(strings.Fields(l), " "))
	}
	want := []string{
		"driver 580.95.05, 3 GPUs, asked in 42ms", "",
		"GPU MODEL BUS TEMP POWER SM CLOCK BUSY MEMORY PCIE NVLINKS LINK ERRORS ECC UNCORR REMAPPED LOWERED BY RANKS",
		"0 NVIDIA H200 00000000:18:00.0 61 °C 650/700 W 1980 MHz 98 % 10.0/140 GiB gen 5 ×16 1/2 up 4 crc, 4 replay, 0 recovery 0 1+2, PENDING power_cap llm/4 llm/5",
		"1 NVIDIA H200 00000000:2A:00.0 - 90 W - - - - - - - - - -",
		"2 NVIDIA H200 LOST: it does not answer its driver",
		"GPU 1: GetClockInfo: Unknown Error",
	}
	if got := strings.Join(lines, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

func TestJSON(t *testing.T) {
	b, err := json.Marshal(example())
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Driver string `json:"driver_version"`
		GPUs   []map[string]any
		Ranks  []map[string]any
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Driver != "580.95.05" || len(got.GPUs) != 3 || len(got.Ranks) != 2 || got.GPUs[0]["throttle"] != "power_cap" || got.GPUs[2]["lost"] != true {
		t.Errorf("%s", b)
	}
	if _, ok := got.GPUs[1]["sm_clock_hertz"]; ok {
		t.Error("what is not known is there")
	}
}

type answers struct {
	updates []func(*source.View) error
}

func (a *answers) Update(v *source.View) error {
	next := a.updates[0]
	if len(a.updates) > 1 {
		a.updates = a.updates[1:]
	}
	return next(v)
}

func TestLook(t *testing.T) {
	none := func(*source.View) error { return nil }
	for name, c := range map[string]struct {
		last func(*source.View) error
		err  string
	}{
		"GPUs":    {func(v *source.View) error { v.GPUs = &collector.GPUs{}; return nil }, ""},
		"nothing": {func(*source.View) error { return fmt.Errorf("%w: no library", source.ErrNoData) }, "no library"},
		"hangs": {func(v *source.View) error {
			v.GPUs = &collector.GPUs{UnresponsiveAt: 1}
			return errors.New("Init has not returned")
		}, "Init has not returned"},
	} {
		s, err := look(t.Context(), &answers{[]func(*source.View) error{none, none, c.last}}, t.TempDir())
		if c.err == "" && (err != nil || s == nil) || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
}
