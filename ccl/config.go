package ccl

import (
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/proxy"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
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
	// GPUDirectAuto uses GPUDirect where every NIC that this rank sends over sits below the
	// GPU's own PCIe switch or root port, and all of them and their backups can register the
	// memory. Where it does not, the log says why.
	GPUDirectAuto = proxy.DirectAuto
	// GPUDirectOff is the default until the other values have been proven on hardware.
	GPUDirectOff = proxy.DirectOff
	// GPUDirectRequire uses GPUDirect at any distance. Init fails, and says why, where a NIC
	// cannot.
	GPUDirectRequire = proxy.DirectRequire
)

// Faults injects faults into transports; package ccltest makes some.
type Faults = transport.Faults

// PathPlan gives connections between nodes their source ports, over TCP and over RoCE v2,
// hence their paths through the fabric; package pathplan/service has a planner's.
type (
	PathPlan  = transport.Paths
	PathConn  = transport.PathConn
	Path      = transport.Path
	LaneState = transport.LaneState
)

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
	// Log gets what an operator should know and no call returns, such as hardware that is there
	// and is not used. Each is said once a process. nil: slog.Default.
	Log *slog.Logger

	// Algo and Proto force the choice where a collective has it; zero leaves it
	// to the cost model.
	Algo  Algo
	Proto Proto
	// GPU tunes what GPU ranks do; zero leaves it to the tuning table.
	GPU GPUConfig
	// Sockets is how many a connection between nodes has, 0 for 2, or for 8 with Paths.
	Sockets int
	// Paths gives connections their source ports, nil for the kernel's choice, and the
	// device's. A TCP connection has twice as many sockets where both of its ends have one:
	// each end's carry what that sends, 8 at most.
	Paths PathPlan
	// Net is what carries bytes between nodes, "" for NetAuto.
	Net Net
	// RDMA tunes it where it does.
	RDMA RDMAConfig
	// GPUDirect says whether NICs read the memory of GPU ranks, "" for GPUDirectOff.
	GPUDirect GPUDirect
	// Interface is the address to listen at for other nodes, "" for the one that
	// leads to rank 0.
	Interface string

	// What ConfigFromEnv leaves for Prepare to do.
	wants wants
}

// wants is what a process needs once, and the environment asks for.
type wants struct {
	recorder bool
	options  record.Options
	// secret is the file in the runtime directory that the ranks of this host share
	// a secret in, "" for none.
	secret string
}

// GPUConfig tunes collectives on device memory.
type GPUConfig struct {
	Algo   string // an algorithm of GPUs (record.Algo), where a collective has it: ll, ll2, ll12, sym, bulk, ce, ring, pushbulk or chain
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
	// Staging is how much of each GPU's memory, in MiB, is for operations on buffers that are
	// in no window: 0 for gpu.DefaultStage, else 2 to 4096 and even. Large operations are the
	// quicker the more there is. It must be the same on all ranks.
	Staging int
	// Peers says of which recorded operations kernels stamp what each peer was to them: "off",
	// "slow" (of 16 MiB and more) or "on"; "" for slow where kernels for it come compiled, else
	// off. Ranks need not agree.
	Peers string
}

// logger is where to log.
func (cfg *Config) logger() *slog.Logger {
	if cfg.Log != nil {
		return cfg.Log
	}
	return slog.Default()
}

const minOutage, maxOutage = time.Second, time.Hour

func (cfg *Config) checkOutage() error {
	if d := cfg.OutageTimeout; d != 0 && (d < minOutage || d > maxOutage) {
		return fmt.Errorf("%v, want %v to %v", d, minOutage, maxOutage)
	}
	return nil
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
