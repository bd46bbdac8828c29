package nccl_test

import (
	"strings"
	"testing"
)

// A copy of NCCL that is closed takes its mask with it, while another one's communicators live: nobody writes there any more.
func TestCopiesOfNCCL(t *testing.T) {
	for _, v := range versions {
		for _, env := range [][]string{nil, {"LOCKSTEP_NCCL_EVENTS=net"}} {
			dir := t.TempDir()
			lines := play(t, plain, dir, env, v, "copies")
			for _, l := range lines {
				if strings.HasPrefix(l, "copy ") {
					t.Errorf("v%s %v: %s", v, env, l)
				}
			}
			c := recorders(t, dir)[0]
			for _, want := range parse(t, lines) {
				check(t, c, want)
				if want.numbered != 800 || c.header.CommOverflow != 0 {
					t.Errorf("v%s: %+v, %d communicators without room", v, want, c.header.CommOverflow)
				}
			}
		}
	}
}
