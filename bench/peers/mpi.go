package peers

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

//go:embed mpi/mpibench.c
var mpibench []byte

// ErrNoMPI says that OpenMPI's compiler or launcher is not installed.
var ErrNoMPI = errors.New("OpenMPI not found (Debian: apt-get install openmpi-bin libopenmpi-dev)")

// MPI measures with OpenMPI's collectives over its own transports (pml ob1).
type MPI struct {
	name   string
	binary string
	mca    []string
}

// BuildMPI compiles mpibench into dir, which the caller owns and removes.
func BuildMPI(ctx context.Context, dir string) (binary string, err error) {
	for _, tool := range []string{"mpicc", "mpirun"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("%w: %w", ErrNoMPI, err)
		}
	}
	source := filepath.Join(dir, "mpibench.c")
	if err := os.WriteFile(source, mpibench, 0o600); err != nil {
		return "", err
	}
	binary = filepath.Join(dir, "mpibench")
	out, err := exec.CommandContext(ctx, "mpicc", "-O2", "-o", binary, source).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mpicc: %w: %s", err, bytes.TrimSpace(out))
	}
	return binary, nil
}

// NewMPI returns a peer that runs binary (see BuildMPI) with further MCA
// parameters, each "name=value".
func NewMPI(name, binary string, mca ...string) *MPI {
	return &MPI{name: name, binary: binary, mca: mca}
}

func (m *MPI) Name() string { return m.name }

func (m *MPI) Run(ctx context.Context, c Case) ([]Sample, error) {
	args := []string{"-np", strconv.Itoa(c.Ranks), "--mca", "pml", "ob1"}
	switch c.Transport {
	case "shm":
		args = append(args, "--mca", "btl", "vader,self")
	case "tcp":
		args = append(args, "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
	default:
		return nil, fmt.Errorf("unknown transport %q", c.Transport)
	}
	if c.Ranks > onlineCPUs() {
		args = append(args, "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
	} else {
		args = append(args, "--bind-to", "core")
	}
	for _, p := range m.mca {
		name, value, ok := strings.Cut(p, "=")
		if !ok {
			return nil, fmt.Errorf("MCA parameter %q is not name=value", p)
		}
		args = append(args, "--mca", name, value)
	}
	args = append(args, m.binary, c.Coll, strconv.Itoa(c.Min), strconv.Itoa(c.Max), strconv.Itoa(c.Factor),
		strconv.Itoa(blocks), strconv.Itoa(blockMillis))
	cmd := command(ctx, "mpirun", args...)
	if os.Geteuid() == 0 {
		cmd.Env = append(os.Environ(), "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
	}
	out, err := output(cmd)
	if err != nil {
		return nil, err
	}
	return parseMPI(out, c)
}

func parseMPI(out []byte, c Case) ([]Sample, error) {
	var samples []Sample
	for line := range strings.Lines(string(out)) {
		var coll string
		var ranks, size, iterations int
		var least, middle float64
		n, err := fmt.Sscan(line, &coll, &ranks, &size, &iterations, &least, &middle)
		if err != nil || n != 6 || coll != c.Coll || ranks != c.Ranks {
			return nil, fmt.Errorf("mpibench printed %q, which is no measurement of this case", strings.TrimSpace(line))
		}
		samples = append(samples, Sample{Bytes: size, Micros: middle})
	}
	return samples, nil
}
