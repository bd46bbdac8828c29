package ras

import (
	"fmt"
	"testing"
)

// What was recorded of a job in which rank 1 is stopped, or is in its data loader. The stopped
// one's JSON lacks commas, and its text has a communicator that is none.
func TestRecorded(t *testing.T) {
	missing := func(pid int32) string { return fmt.Sprintf("missing [{Rank:1 PID:%d Dead:false}] behind []", pid) }
	behind := func(launched, most uint64) string {
		return fmt.Sprintf("missing [] behind [{Rank:1 Coll:AllReduce Launched:%d Most:%d}]", launched, most)
	}
	for _, format := range []string{"json", "text"} {
		for name, want := range map[string]map[uint64]string{
			"unresponsive": {0x3baa1a67ef6c0b93: missing(1100), 0x64d70e975633cd11: missing(1100)},
			"behind": {
				0x970c345f01cb5f06: behind(3193, 3201), 0xb54ce798b82c3e8e: behind(3600, 3609), 0xf09e4525241cb09b: behind(800, 802),
			},
		} {
			a, err := Parse(sample(t, format+"-2.28.9-"+name))
			if err != nil {
				t.Errorf("%s, %s: %v", name, format, err)
				continue
			}
			if a.Version != "2.28.9" {
				t.Errorf("%s, %s: version %q", name, format, a.Version)
			}
			got := map[uint64]string{}
			for _, c := range a.Comms {
				got[c.ID] = fmt.Sprintf("missing %+v behind %+v", c.Missing, c.Behind)
			}
			for id, w := range want {
				if got[id] != w {
					t.Errorf("%s, %s, communicator %x: %s, want %s", name, format, id, got[id], w)
				}
			}
		}
	}
}
