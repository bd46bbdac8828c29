package torchjob

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/attachcmd"
)

// MissingError says what this Machine lacks for PyTorch ranks, and what to do.
type MissingError struct {
	What string // Python, PyTorch, GPUs, NCCL, plugin
	Text string
	Err  error
}

func (e *MissingError) Error() string {
	s := "--trainer torch: " + e.Text
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

func (e *MissingError) Unwrap() error { return e.Err }

// Machine is what there is.
type Machine struct {
	python string
	Torch  string `json:"torch"`
	GPUs   int    `json:"gpus"`
	NCCL   string `json:"nccl"`
}

// ask is one line of JSON; what is missing is left empty.
const ask = `import json
said = {}
try:
    import torch
    said["torch"] = torch.__version__
    if torch.cuda.is_available():
        said["gpus"] = torch.cuda.device_count()
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as e:
    said["error"] = f"{type(e).__name__}: {e}"
print(json.dumps(said))
`

// Look finds out whether PyTorch ranks can run here. exe is this program's own path.
func Look(ctx context.Context, exe, plugin string) (m Machine, err error) {
	if m.python, err = exec.LookPath("python3"); err != nil {
		return m, &MissingError{"Python", "there is no python3 in PATH; activate the environment that has PyTorch", err}
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // importing torch from a cold disk takes long
	defer cancel()
	var said struct {
		Machine
		Error string `json:"error"`
	}
	out, err := exec.CommandContext(ctx, m.python, "-c", ask).Output()
	if err == nil {
		err = json.Unmarshal([]byte(strings.TrimSpace(string(out))), &said)
	}
	if err != nil {
		return m, &MissingError{"Python", m.python + " does not say whether it has PyTorch", err}
	}
	said.python = m.python
	m = said.Machine
	var failed error
	if said.Error != "" {
		failed = errors.New(said.Error)
	}
	switch {
	case m.Torch == "":
		return m, &MissingError{"PyTorch", "PyTorch is not installed for " + m.python + " (pip install torch, or activate its environment)", failed}
	case m.GPUs < 2:
		return m, &MissingError{"GPUs", fmt.Sprintf("PyTorch %s sees %d GPUs here, and NCCL needs one for each of at least two ranks; without GPUs lockstep demo shows the same on CPU ranks", m.Torch, m.GPUs), failed}
	case m.NCCL == "":
		return m, &MissingError{"NCCL", "PyTorch " + m.Torch + " has no NCCL", failed}
	}
	if plugin == "" {
		plugin = filepath.Join(filepath.Dir(exe), attachcmd.PluginFile)
	}
	if _, err := os.Stat(plugin); err != nil {
		return m, &MissingError{"plugin", "NCCL's profiler plugin is not beside this program (make build makes it; LOCKSTEP_NCCL_PLUGIN says where it is)", err}
	}
	return m, nil
}
