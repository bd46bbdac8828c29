package ccl

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/proxy"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

// UniqueID names a communicator before it exists: where its rank 0 will listen,
// and a random token. One process makes it, all ranks get it out of band. It is
// no secret.
type UniqueID struct{ id bootstrap.ID }

// NewUniqueID makes an id for a rank 0 that will listen at addr (host:port).
// Nothing listens before rank 0 calls Init.
func NewUniqueID(addr string) (UniqueID, error) {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return UniqueID{}, fmt.Errorf("new communicator id: %w", err)
	}
	return UniqueID{bootstrap.NewID(addr)}, nil
}

// ParseUniqueID is the inverse of UniqueID.String.
func ParseUniqueID(s string) (UniqueID, error) {
	id, err := bootstrap.ParseID(s)
	return UniqueID{id}, err
}

// String is the form in which an id travels.
func (u UniqueID) String() string { return u.id.String() }

// Algo and Proto name how a collective runs.
type (
	Algo  = record.Algo
	Proto = record.Proto
)

// GPUDirect says whether NICs read what GPU ranks send between nodes from the GPUs'
// memory. Each rank may have its own.
type GPUDirect = proxy.Direct

const (
	// GPUDirectAuto: where each NIC that this rank sends over is below the GPU's own PCIe
	// switch or root port, and these and their backups take the memory. The log says why not.
	GPUDirectAuto = proxy.DirectAuto
	// GPUDirectOff is the default, as long as no hardware has shown that the rest is right.
	GPUDirectOff = proxy.DirectOff
	// GPUDirectRequire: at any distance, or Init fails and says why.
	GPUDirectRequire = proxy.DirectRequire
)

// Faults injects faults into transports; package ccltest makes some.
type Faults = transport.Faults

// Config is what a rank brings to Init. ID, Rank and Size are required.
type Config struct {
	ID   UniqueID
	Rank int
	Size int
	Name string // of the communicator in records and errors, "world" by default

	// Secret is shared by all ranks: at least 16 bytes of high entropy. nil: the
	// contents of the file that LOCKSTEP_SECRET_FILE names.
	Secret []byte
	// Node is the logical node: ranks with equal names share memory, others
	// connect by TCP. "": $LOCKSTEP_NODE, else the host's name.
	Node string
	// Device is the rank's GPU, CPU by default. Ranks with one may pass device
	// memory to collectives; either all ranks of a communicator have one or none.
	Device Device
	// Timeout bounds joining, 1 minute by default.
	Timeout time.Duration
	// OutageTimeout is how long another rank's host may be silent, 1 s to 1 h, 30 s by
	// default: a network that is away for less costs time, not the communicator.
	OutageTimeout time.Duration

	// Recorder is where operations are recorded, nil for nowhere. The caller
	// owns it and closes it after the last communicator.
	Recorder *record.Writer
	Faults   Faults
	// Log is told what an operator may want to know and no call returns: what was found
	// and is not used, once in a process; nil for slog's default.
	Log *slog.Logger

	// Algo and Proto force the choice where a collective has it; zero leaves it
	// to the cost model.
	Algo  Algo
	Proto Proto
	// GPU tunes what GPU ranks do; zero leaves it to the tuning table.
	GPU GPUConfig
	// Sockets is how many a connection between nodes has, 0 for the default.
	Sockets int
	// Net is what carries bytes between nodes, "" for NetAuto.
	Net Net
	// RDMA tunes it where it does.
	RDMA RDMAConfig
	// GPUDirect says whether NICs read the memory of GPU ranks, "" for GPUDirectOff.
	GPUDirect GPUDirect
	// Interface is the address to listen at for other nodes, "" for the one that
	// leads to rank 0.
	Interface string
}

// GPUConfig tunes collectives on device memory.
type GPUConfig struct {
	Algo   string // an algorithm of GPUs (record.Algo), where a collective has it: ll, ll2, ll12, sym, bulk, ce or pushbulk
	Blocks int    // multiprocessors, where the algorithm takes a choice
	// Table is a file that says which algorithm operations take, as bench/cmd/gputune
	// writes it; "" for the table that is built in.
	Table string
	// Threads of each, a multiple of 32 up to 512, where a kernel takes any such number.
	Threads int
	// Pace is how much each GPU sends to its peers by bulk copies at most, in GB/s: 0 for
	// what its links carry, as far as known; negative: no limit. Links that are asked for
	// more than they carry carry less.
	Pace int
}

// logger is where to log.
func (cfg *Config) logger() *slog.Logger {
	if cfg.Log != nil {
		return cfg.Log
	}
	return slog.Default()
}

// ConfigFromEnv reads what a launcher sets: LOCKSTEP_RANK, LOCKSTEP_WORLD_SIZE
// and LOCKSTEP_LOCAL_RANK (or torchrun's RANK, WORLD_SIZE, LOCAL_RANK, or what package
// launcher knows of srun, mpirun and Kubernetes), LOCKSTEP_COMM_ID (or MASTER_ADDR and
// MASTER_PORT: rank 0 then listens one port above, or at LOCKSTEP_COMM_PORT), LOCKSTEP_NODE, LOCKSTEP_ALGO, LOCKSTEP_PROTO,
// LOCKSTEP_SOCKETS, LOCKSTEP_IFNAME and LOCKSTEP_OUTAGE_TIMEOUT (30s), LOCKSTEP_NET, LOCKSTEP_RDMA_HCA, _GID, _QPS,
// _TIMEOUT, _RETRIES, _TRAFFIC_CLASS and _SERVICE_LEVEL, LOCKSTEP_DEVICE (cpu, cuda:N, or cuda for
// the GPU of the local rank's number), LOCKSTEP_GPU_ALGO, _PACE and _TABLE, LOCKSTEP_GPUDIRECT; the secret stays in the file that
// LOCKSTEP_SECRET_FILE names. Unless LOCKSTEP_RECORDER is "off" it also creates
// the process's flight recorder in LOCKSTEP_RUNTIME_DIR, for job LOCKSTEP_JOB
// and attempt LOCKSTEP_RESTART_COUNT; the caller closes Config.Recorder last. Where
// none can be made it warns and goes on without.
func ConfigFromEnv() (Config, error) {
	cfg, err := configFromEnv()
	if err != nil {
		return Config{}, fmt.Errorf("configure from environment: %w", err)
	}
	return cfg, nil
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
		GPU:     GPUConfig{Algo: os.Getenv("LOCKSTEP_GPU_ALGO"), Table: os.Getenv("LOCKSTEP_GPU_TABLE"), Pace: number(0, "LOCKSTEP_GPU_PACE")},
		Net:     Net(os.Getenv("LOCKSTEP_NET")),

		GPUDirect: GPUDirect(os.Getenv("LOCKSTEP_GPUDIRECT")),
		RDMA: RDMAConfig{
			HCA: os.Getenv("LOCKSTEP_RDMA_HCA"), GID: os.Getenv("LOCKSTEP_RDMA_GID"),
			QueuePairs: number(0, "LOCKSTEP_RDMA_QPS"), Timeout: number(0, "LOCKSTEP_RDMA_TIMEOUT"), Retries: number(0, "LOCKSTEP_RDMA_RETRIES"),
			TrafficClass: number(0, "LOCKSTEP_RDMA_TRAFFIC_CLASS"), ServiceLevel: number(0, "LOCKSTEP_RDMA_SERVICE_LEVEL"),
		},
	}
	if err := cfg.checkNet(); err != nil {
		errs = append(errs, fmt.Errorf("LOCKSTEP_NET, LOCKSTEP_RDMA_*: %w", err))
	}
	if err := cfg.GPUDirect.Check(); err != nil {
		errs = append(errs, fmt.Errorf("LOCKSTEP_GPUDIRECT is %w", err))
	}
	local := number(who.Local, "LOCKSTEP_LOCAL_RANK", "LOCAL_RANK")
	attempt := number(who.Attempt, "LOCKSTEP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
	if v := os.Getenv("LOCKSTEP_COMM_ID"); v == "" {
		cfg.ID, cfg.Secret, err = derivedID(who, cfg.Rank, cfg.Size, attempt)
		errs = append(errs, err)
	} else {
		cfg.ID, err = ParseUniqueID(v)
		errs = append(errs, err)
	}
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
	if err := errors.Join(errs...); err != nil {
		return Config{}, err
	}
	if os.Getenv("LOCKSTEP_RECORDER") != "off" {
		job := cmp.Or(os.Getenv("LOCKSTEP_JOB"), who.Job, "job")
		o := record.Options{Dir: runtimeDir(nil), Identity: record.Identity{
			Job: job, Node: cfg.Node, Rank: int32(cfg.Rank), WorldSize: int32(cfg.Size), LocalRank: int32(local), Attempt: uint32(attempt),
		}}
		if cfg.Device != CPU {
			o.StampSlots = record.GPUStampSlots
		}
		if cfg.Recorder, err = record.Create(o); err != nil { // the job matters more
			slog.Warn("no flight recorder, so nobody will see what this rank does: make room or set LOCKSTEP_RUNTIME_DIR, or LOCKSTEP_RECORDER=off", "rank", cfg.Rank, "err", err)
		}
	}
	return cfg, nil
}

const minOutage, maxOutage = time.Second, time.Hour

func (cfg *Config) checkOutage() error {
	if d := cfg.OutageTimeout; d != 0 && (d < minOutage || d > maxOutage) {
		return fmt.Errorf("%v, want %v to %v", d, minOutage, maxOutage)
	}
	return nil
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

// ParseAlgo and ParseProto read names as LOCKSTEP_ALGO and LOCKSTEP_PROTO have
// them; "" is the cost model's choice.
func ParseAlgo(s string) (Algo, error) {
	return record.ParseAlgo(s, record.Algo.OnCPU)
}

func ParseProto(s string) (Proto, error) {
	return parseName(s, "protocol", record.ProtoNone, record.ProtoSimple)
}

// parseName finds the value between none and last that is called v.
func parseName[T interface {
	~uint8
	String() string
}](v, what string, none, last T) (T, error) {
	if v == "" {
		return none, nil
	}
	var names []string
	for t := none + 1; t <= last; t++ {
		if strings.EqualFold(v, t.String()) {
			return t, nil
		}
		names = append(names, t.String())
	}
	return none, fmt.Errorf("%s is %q, want one of %s", what, v, strings.Join(names, ", "))
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
