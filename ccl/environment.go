package ccl

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

// ConfigFromEnv reads what a launcher sets: docs/environment.md lists the names. It
// changes nothing; Prepare does what is to be done.
func ConfigFromEnv() (Config, error) {
	cfg, err := configFromEnv()
	if err != nil {
		return Config{}, fmt.Errorf("configure from environment: %w", err)
	}
	return cfg, nil
}

// Prepare makes what ConfigFromEnv has found that the process needs: its flight
// recorder, in LOCKSTEP_RUNTIME_DIR, which the caller closes last, and the secret of ranks
// of one host that were given none. Where no recorder can be made it says so in the log
// and goes on without.
func (cfg *Config) Prepare() error {
	w := cfg.wants
	cfg.wants = wants{}
	if w.secret != "" && len(cfg.Secret) == 0 {
		var err error
		if cfg.Secret, err = sharedSecret(secretDir(), w.secret); err != nil {
			return fmt.Errorf("rank %d: a secret for the ranks of this host: %w (or set %s)", cfg.Rank, err, bootstrap.SecretEnv)
		}
	}
	if w.recorder && cfg.Recorder == nil {
		var err error
		w.options.Dir = runtimeDir(cfg.Secret, cfg.logger())
		if cfg.Recorder, err = record.Create(w.options); err != nil { // the job matters more
			cfg.logger().Warn("no flight recorder, so nobody will see what this rank does: make room or set LOCKSTEP_RUNTIME_DIR, or LOCKSTEP_RECORDER=off", "rank", cfg.Rank, "err", err)
		}
	}
	return nil
}

func configFromEnv() (Config, error) {
	var errs []error
	number := func(fallback int, names ...string) int {
		for _, name := range names {
			v := os.Getenv(name)
			if v == "" {
				continue
			}
			n, err := strconv.Atoi(v)
			if err != nil || n < 0 {
				errs = append(errs, fmt.Errorf("%s is %q, want a number", name, v))
			}
			return n
		}
		if fallback < 0 {
			errs = append(errs, fmt.Errorf("%s is not set", strings.Join(names, " or ")))
		}
		return fallback
	}
	who, err := launcher.Detect(nil)                              // of srun, mpirun, Kubernetes too
	if who.Launcher != "lockstep" && who.Launcher != "torchrun" { // number tells of theirs
		errs = append(errs, err)
	}
	none := func(n int) int { // what is missing is an error
		if n == 0 {
			return -1
		}
		return n
	}
	cfg := Config{
		Rank:    number(who.Rank, "LOCKSTEP_RANK", "RANK"),
		Size:    number(none(who.World), "LOCKSTEP_WORLD_SIZE", "WORLD_SIZE"),
		Sockets: number(0, "LOCKSTEP_SOCKETS"),
		Node:    nodeName(),
		GPU:     GPUConfig{Algo: os.Getenv("LOCKSTEP_GPU_ALGO"), Table: os.Getenv("LOCKSTEP_GPU_TABLE"), Pace: number(0, "LOCKSTEP_GPU_PACE"), Staging: number(0, "LOCKSTEP_GPU_STAGING"), Peers: os.Getenv("LOCKSTEP_GPU_PEERS")},
		Net:     Net(os.Getenv("LOCKSTEP_NET")),

		GPUDirect: GPUDirect(os.Getenv("LOCKSTEP_GPUDIRECT")),
		RDMA: RDMAConfig{
			HCA: os.Getenv("LOCKSTEP_RDMA_HCA"), GID: os.Getenv("LOCKSTEP_RDMA_GID"),
			QueuePairs: number(0, "LOCKSTEP_RDMA_QPS"), Timeout: number(0, "LOCKSTEP_RDMA_TIMEOUT"), Retries: number(0, "LOCKSTEP_RDMA_RETRIES"),
			TrafficClass: number(0, "LOCKSTEP_RDMA_TRAFFIC_CLASS"), ServiceLevel: number(0, "LOCKSTEP_RDMA_SERVICE_LEVEL"),
		},
	}
	if err := checkNet(cfg.Net, &cfg.RDMA); err != nil {
		errs = append(errs, fmt.Errorf("LOCKSTEP_NET, LOCKSTEP_RDMA_*: %w", err))
	}
	if err := cfg.GPUDirect.Check(); err != nil {
		errs = append(errs, fmt.Errorf("LOCKSTEP_GPUDIRECT is %w", err))
	}
	local := number(who.Local, "LOCKSTEP_LOCAL_RANK", "LOCAL_RANK")
	attempt := number(who.Attempt, "LOCKSTEP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
	if v := os.Getenv("LOCKSTEP_COMM_ID"); v == "" {
		cfg.ID, cfg.wants.secret, err = derivedID(who, cfg.Size, attempt)
		errs = append(errs, err)
	} else {
		cfg.ID, err = ParseUniqueID(v)
		errs = append(errs, err)
	}
	errs = append(errs, cfg.parseEnv(local))
	if err := errors.Join(errs...); err != nil {
		return Config{}, err
	}
	if os.Getenv("LOCKSTEP_RECORDER") != "off" {
		cfg.wants.recorder = true
		cfg.wants.options.Identity = record.Identity{
			Job: cmp.Or(os.Getenv("LOCKSTEP_JOB"), who.Job, "job"), Node: cfg.Node,
			Rank: int32(cfg.Rank), WorldSize: int32(cfg.Size), LocalRank: int32(local), Attempt: uint32(attempt),
		}
		if cfg.Device != CPU {
			cfg.wants.options.StampSlots = record.GPUStampSlots
		}
	}
	return cfg, nil
}

// parseDevice reads LOCKSTEP_DEVICE.
func parseDevice(v string, local int) (Device, error) {
	switch ordinal, ok := strings.CutPrefix(v, "cuda:"); {
	case v == "" || v == "cpu":
		return CPU, nil
	case v == "cuda":
		return GPU(local), nil
	case ok:
		if n, err := strconv.Atoi(ordinal); err == nil && n >= 0 {
			return GPU(n), nil
		}
	}
	return CPU, fmt.Errorf("LOCKSTEP_DEVICE is %q, want cpu, cuda or cuda:N", v)
}

func nodeName() string {
	if n := os.Getenv("LOCKSTEP_NODE"); n != "" {
		return n
	}
	n, err := os.Hostname()
	if err != nil {
		return "node"
	}
	return n
}

// interfaceAddr is the first address of the interface called name.
func interfaceAddr(name string) (string, error) {
	if name == "" {
		return "", nil
	}
	ifc, err := net.InterfaceByName(name)
	if err != nil {
		return "", fmt.Errorf("LOCKSTEP_IFNAME: %w", err)
	}
	addrs, err := ifc.Addrs()
	if err != nil {
		return "", fmt.Errorf("LOCKSTEP_IFNAME: addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		if ip, ok := a.(*net.IPNet); ok {
			return ip.IP.String(), nil
		}
	}
	return "", fmt.Errorf("LOCKSTEP_IFNAME: interface %s has no address", name)
}

// parseEnv reads the names whose values are words, times and devices.
func (cfg *Config) parseEnv(local int) error {
	var errs []error
	var err error
	if cfg.Algo, err = ParseAlgo(os.Getenv("LOCKSTEP_ALGO")); err != nil {
		errs = append(errs, fmt.Errorf("LOCKSTEP_ALGO: %w", err))
	}
	if cfg.Proto, err = parseName(os.Getenv("LOCKSTEP_PROTO"), "LOCKSTEP_PROTO", record.ProtoNone, record.ProtoSimple); err != nil {
		errs = append(errs, err)
	}
	if v := os.Getenv("LOCKSTEP_OUTAGE_TIMEOUT"); v != "" {
		if cfg.OutageTimeout, err = time.ParseDuration(v); err != nil || cfg.checkOutage() != nil {
			errs = append(errs, fmt.Errorf("LOCKSTEP_OUTAGE_TIMEOUT is %q, want a duration from %v to %v", v, minOutage, maxOutage))
		}
	}
	if cfg.Interface, err = interfaceAddr(os.Getenv("LOCKSTEP_IFNAME")); err != nil {
		errs = append(errs, err)
	}
	if cfg.Device, err = parseDevice(os.Getenv("LOCKSTEP_DEVICE"), local); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
