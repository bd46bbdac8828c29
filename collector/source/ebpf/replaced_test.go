package ebpf_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/record"
)

// A rank whose library has been upgraded under it (pip does) is watched by the file that it has mapped, which
// has no name any more, not by the one that has the name now.
func TestALibraryThatWasReplaced(t *testing.T) {
	for _, replaced := range []bool{true, false} {
		j := newJob(t, 1)
		from, dir := standIn(t), t.TempDir()
		for _, name := range []string{"rank", "libnccl.so.2"} {
			copyFile(t, filepath.Join(from, name), filepath.Join(dir, name))
		}
		r := j.startAs(0, exec.Command(filepath.Join(dir, "rank"), "0", "1", j.file))
		r.do("hello")
		library := filepath.Join(dir, "libnccl.so.2")
		if err := os.Remove(library); err != nil {
			t.Fatal(err)
		}
		if replaced {
			copyFile(t, filepath.Join(from, "libnccl.so.2"), library)
		}
		j.watch(ebpf.Options{})
		j.attached(1)
		r.do("init world")
		r.do("call AllReduce 4")
		j.comm(j.reader(0), "4 calls", func(c record.CommStatus) bool { return c.Finished == 4 })
	}
}
