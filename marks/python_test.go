package marks_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// No call raises or blocks, whatever it is given, and whatever a signal or a fork interrupts.
func TestPythonStrangers(t *testing.T) {
	for name, c := range map[string]struct {
		code  string
		files int
	}{
		"no numbers": {`
for n in (None, "x", float("nan"), float("inf"), -1, 1 << 64, b"x", [], object()):
    lockstep.step(n)
    assert lockstep.why() is not None, n
lockstep.step(3)
`, 1},
		"a handler in the first mark": {`
import signal
from lockstep import _recorder
made = _recorder.Recorder
def slow():
    os.kill(os.getpid(), signal.SIGUSR1)
    return made()
_recorder.Recorder = slow
signal.signal(signal.SIGUSR1, lambda *_: lockstep.step(1))
lockstep.step(2)
assert lockstep.why() is None, lockstep.why()
`, 1},
		"a fork in another thread's first mark": {`
import threading
from lockstep import _recorder
begun, forked = threading.Event(), threading.Event()
made = _recorder.Recorder
def slow():
    begun.set()
    forked.wait()
    return made()
_recorder.Recorder = slow
t = threading.Thread(target=lockstep.step, args=(1,))
t.start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    forked.set()
    _recorder.Recorder = made
    lockstep.step(2)
    assert lockstep.why() is None, lockstep.why()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
forked.set()
t.join()
`, 2},
		"a loader's workers": {`
class Loader:
    def __iter__(self):
        child = os.fork()
        if child == 0:
            with lockstep.data_loading():
                pass
            os._exit(0)
        os.waitpid(child, 0)
        return iter([1, 2])
assert list(lockstep.loading(Loader())) == [1, 2]
`, 1},
	} {
		dir := filepath.Join(t.TempDir(), "rt")
		cmd := exec.Command(python(t), "-c", "import os, signal, lockstep\nsignal.alarm(60)\n"+c.code) // what hangs ends by it
		cmd.Env = append(os.Environ(), "PYTHONPATH=python", "PYTHONDONTWRITEBYTECODE=1", "LOCKSTEP_RUNTIME_DIR="+dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
		if paths, _ := record.List(dir); len(paths) != c.files {
			t.Errorf("%s: files of marks %v, want %d", name, paths, c.files)
		}
	}
}
