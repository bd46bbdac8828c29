package replay

import (
	"math"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	pb "github.com/lockstep-ccl/lockstep/diagnosis/replay/internal/evidencepb"
	"github.com/lockstep-ccl/lockstep/record"
)

// column is one field of a table's entries. A new field of diagnosis.Evidence is
// one column here and one in evidence.proto.
type column[T, M any] struct {
	values func(*M) *[]int64
	get    func(*T) uint64
	set    func(*T, uint64)
	time   bool
}

type integer interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~uint8 | ~uint16 | ~uint32 | ~uint64
}

func number[T, M any, V integer](field func(*T) *V, values func(*M) *[]int64) column[T, M] {
	return column[T, M]{
		values: values,
		get:    func(t *T) uint64 { return uint64(*field(t)) },
		set:    func(t *T, bits uint64) { *field(t) = V(bits) },
	}
}

// moment is a time in unix ns, 0 for never.
func moment[T, M any](field func(*T) *int64, values func(*M) *[]int64) column[T, M] {
	c := number(field, values)
	c.time = true
	return c
}

func flag[T, M any](field func(*T) *bool, values func(*M) *[]int64) column[T, M] {
	return column[T, M]{
		values: values,
		get: func(t *T) uint64 {
			if *field(t) {
				return 1
			}
			return 0
		},
		set: func(t *T, bits uint64) { *field(t) = bits != 0 },
	}
}

func float[T, M any](field func(*T) *float32, values func(*M) *[]int64) column[T, M] {
	return column[T, M]{
		values: values,
		get:    func(t *T) uint64 { return uint64(math.Float32bits(*field(t))) },
		set:    func(t *T, bits uint64) { *field(t) = math.Float32frombits(uint32(bits)) },
	}
}

func double[T, M any](field func(*T) *float64, values func(*M) *[]int64) column[T, M] {
	return column[T, M]{
		values: values,
		get:    func(t *T) uint64 { return math.Float64bits(*field(t)) },
		set:    func(t *T, bits uint64) { *field(t) = math.Float64frombits(bits) },
	}
}

var nodeColumns = []column[diagnosis.Node, pb.Nodes]{
	moment(func(t *diagnosis.Node) *int64 { return &t.LastSeen }, func(m *pb.Nodes) *[]int64 { return &m.LastSeenAt }),
	flag(func(t *diagnosis.Node) *bool { return &t.Lost }, func(m *pb.Nodes) *[]int64 { return &m.Lost }),
	number(func(t *diagnosis.Node) *int64 { return &t.MapError }, func(m *pb.Nodes) *[]int64 { return &m.MapError }),
	float(func(t *diagnosis.Node) *float32 { return &t.CPUPressure }, func(m *pb.Nodes) *[]int64 { return &m.CpuPressure }),
	float(func(t *diagnosis.Node) *float32 { return &t.MemoryPressure }, func(m *pb.Nodes) *[]int64 { return &m.MemoryPressure }),
}

var rankColumns = []column[diagnosis.Rank, pb.Ranks]{
	number(func(t *diagnosis.Rank) *int32 { return &t.Node }, func(m *pb.Ranks) *[]int64 { return &m.Node }),
	number(func(t *diagnosis.Rank) *int32 { return &t.PID }, func(m *pb.Ranks) *[]int64 { return &m.Pid }),
	number(func(t *diagnosis.Rank) *uint32 { return &t.Attempt }, func(m *pb.Ranks) *[]int64 { return &m.Attempt }),
	number(func(t *diagnosis.Rank) *diagnosis.ProcState { return &t.Proc }, func(m *pb.Ranks) *[]int64 { return &m.Proc }),
	moment(func(t *diagnosis.Rank) *int64 { return &t.ProcAt }, func(m *pb.Ranks) *[]int64 { return &m.ProcAt }),
	float(func(t *diagnosis.Rank) *float32 { return &t.CPU }, func(m *pb.Ranks) *[]int64 { return &m.Cpu }),
	flag(func(t *diagnosis.Rank) *bool { return &t.IO }, func(m *pb.Ranks) *[]int64 { return &m.Io }),
	float(func(t *diagnosis.Rank) *float32 { return &t.Starved }, func(m *pb.Ranks) *[]int64 { return &m.Starved }),
	float(func(t *diagnosis.Rank) *float32 { return &t.Throttled }, func(m *pb.Ranks) *[]int64 { return &m.Throttled }),
	float(func(t *diagnosis.Rank) *float32 { return &t.MemoryPressure }, func(m *pb.Ranks) *[]int64 { return &m.MemoryPressure }),
	float(func(t *diagnosis.Rank) *float32 { return &t.OffCPU.Disk }, func(m *pb.Ranks) *[]int64 { return &m.OffCpuDisk }),
	float(func(t *diagnosis.Rank) *float32 { return &t.OffCPU.NCCLStarved }, func(m *pb.Ranks) *[]int64 { return &m.OffCpuNcclStarved }),
	float(func(t *diagnosis.Rank) *float32 { return &t.OffCPU.ChildDisk }, func(m *pb.Ranks) *[]int64 { return &m.OffCpuChildDisk }),
	float(func(t *diagnosis.Rank) *float32 { return &t.OffCPU.ChildStarved }, func(m *pb.Ranks) *[]int64 { return &m.OffCpuChildStarved }),
	number(func(t *diagnosis.Rank) *diagnosis.WaitFor { return &t.OffCPU.For }, func(m *pb.Ranks) *[]int64 { return &m.OffCpuFor }),
	number(func(t *diagnosis.Rank) *uint32 { return &t.OffCPU.Resent }, func(m *pb.Ranks) *[]int64 { return &m.TcpResent }),
	flag(func(t *diagnosis.Rank) *bool { return &t.Starting }, func(m *pb.Ranks) *[]int64 { return &m.Starting }),
	number(func(t *diagnosis.Rank) *diagnosis.WaitIn { return &t.WaitsIn }, func(m *pb.Ranks) *[]int64 { return &m.WaitsIn }),
	number(func(t *diagnosis.Rank) *diagnosis.ExitSource { return &t.Exit.By }, func(m *pb.Ranks) *[]int64 { return &m.ExitBy }),
	number(func(t *diagnosis.Rank) *int32 { return &t.Exit.Code }, func(m *pb.Ranks) *[]int64 { return &m.ExitCode }),
	number(func(t *diagnosis.Rank) *int32 { return &t.Exit.Signal }, func(m *pb.Ranks) *[]int64 { return &m.ExitSignal }),
	moment(func(t *diagnosis.Rank) *int64 { return &t.Exit.At }, func(m *pb.Ranks) *[]int64 { return &m.ExitAt }),
	flag(func(t *diagnosis.Rank) *bool { return &t.Exit.Asked }, func(m *pb.Ranks) *[]int64 { return &m.ExitAsked }),
	number(func(t *diagnosis.Rank) *record.MarkCode { return &t.Mark }, func(m *pb.Ranks) *[]int64 { return &m.Mark }),
	moment(func(t *diagnosis.Rank) *int64 { return &t.MarkAt }, func(m *pb.Ranks) *[]int64 { return &m.MarkAt }),
	number(func(t *diagnosis.Rank) *uint64 { return &t.Step }, func(m *pb.Ranks) *[]int64 { return &m.Step }),
	number(func(t *diagnosis.Rank) *uint32 { return &t.Xid }, func(m *pb.Ranks) *[]int64 { return &m.Xid }),
	flag(func(t *diagnosis.Rank) *bool { return &t.GPU.Seen }, func(m *pb.Ranks) *[]int64 { return &m.GpuSeen }),
	number(func(t *diagnosis.Rank) *uint16 { return &t.GPU.Index }, func(m *pb.Ranks) *[]int64 { return &m.GpuIndex }),
	moment(func(t *diagnosis.Rank) *int64 { return &t.GPU.XidAt }, func(m *pb.Ranks) *[]int64 { return &m.GpuXidAt }),
	moment(func(t *diagnosis.Rank) *int64 { return &t.GPU.LostAt }, func(m *pb.Ranks) *[]int64 { return &m.GpuLostAt }),
	moment(func(t *diagnosis.Rank) *int64 { return &t.GPU.ThrottledAt }, func(m *pb.Ranks) *[]int64 { return &m.GpuThrottledAt }),
	number(func(t *diagnosis.Rank) *diagnosis.Throttle { return &t.GPU.Throttle }, func(m *pb.Ranks) *[]int64 { return &m.GpuThrottle }),
	moment(func(t *diagnosis.Rank) *int64 { return &t.GPU.UnresponsiveAt }, func(m *pb.Ranks) *[]int64 { return &m.GpuUnresponsiveAt }),
}

var callColumns = []column[diagnosis.Call, pb.Calls]{
	number(func(t *diagnosis.Call) *uint64 { return &t.Comm }, func(m *pb.Calls) *[]int64 { return &m.Comm }),
	number(func(t *diagnosis.Call) *uint64 { return &t.Seq }, func(m *pb.Calls) *[]int64 { return &m.Seq }),
	number(func(t *diagnosis.Call) *record.CollKind { return &t.Coll }, func(m *pb.Calls) *[]int64 { return &m.Coll }),
	number(func(t *diagnosis.Call) *int32 { return &t.Peer }, func(m *pb.Calls) *[]int64 { return &m.Peer }),
	number(func(t *diagnosis.Call) *uint64 { return &t.Bytes }, func(m *pb.Calls) *[]int64 { return &m.Bytes }),
	moment(func(t *diagnosis.Call) *int64 { return &t.At }, func(m *pb.Calls) *[]int64 { return &m.At }),
}

var commColumns = []column[comm, pb.Comms]{
	number(func(t *comm) *uint64 { return &t.id }, func(m *pb.Comms) *[]int64 { return &m.Id }),
	number(func(t *comm) *int32 { return &t.size }, func(m *pb.Comms) *[]int64 { return &m.Size }),
}

var memberColumns = []column[diagnosis.Member, pb.Members]{
	number(func(t *diagnosis.Member) *int32 { return &t.World }, func(m *pb.Members) *[]int64 { return &m.World }),
	number(func(t *diagnosis.Member) *record.CommState { return &t.State }, func(m *pb.Members) *[]int64 { return &m.State }),
	moment(func(t *diagnosis.Member) *int64 { return &t.StateAt }, func(m *pb.Members) *[]int64 { return &m.StateAt }),
	number(func(t *diagnosis.Member) *record.Result { return &t.Fault }, func(m *pb.Members) *[]int64 { return &m.Fault }),
	number(func(t *diagnosis.Member) *int32 { return &t.FaultPeer }, func(m *pb.Members) *[]int64 { return &m.FaultPeer }),
	number(func(t *diagnosis.Member) *record.CollKind { return &t.Coll }, func(m *pb.Members) *[]int64 { return &m.Coll }),
	number(func(t *diagnosis.Member) *int32 { return &t.Peer }, func(m *pb.Members) *[]int64 { return &m.Peer }),
	number(func(t *diagnosis.Member) *uint64 { return &t.Bytes }, func(m *pb.Members) *[]int64 { return &m.Bytes }),
	number(func(t *diagnosis.Member) *uint64 { return &t.Enqueued }, func(m *pb.Members) *[]int64 { return &m.Enqueued }),
	number(func(t *diagnosis.Member) *uint64 { return &t.Started }, func(m *pb.Members) *[]int64 { return &m.Started }),
	number(func(t *diagnosis.Member) *uint64 { return &t.Finished }, func(m *pb.Members) *[]int64 { return &m.Finished }),
	moment(func(t *diagnosis.Member) *int64 { return &t.EnqueuedAt }, func(m *pb.Members) *[]int64 { return &m.EnqueuedAt }),
	moment(func(t *diagnosis.Member) *int64 { return &t.StartedAt }, func(m *pb.Members) *[]int64 { return &m.StartedAt }),
	moment(func(t *diagnosis.Member) *int64 { return &t.FinishedAt }, func(m *pb.Members) *[]int64 { return &m.FinishedAt }),
	number(func(t *diagnosis.Member) *uint64 { return &t.Ops }, func(m *pb.Members) *[]int64 { return &m.Ops }),
	number(func(t *diagnosis.Member) *uint64 { return &t.OwnNs }, func(m *pb.Members) *[]int64 { return &m.OwnNs }),
	number(func(t *diagnosis.Member) *uint64 { return &t.WaitNs }, func(m *pb.Members) *[]int64 { return &m.WaitNs }),
	number(func(t *diagnosis.Member) *uint64 { return &t.TransferNs }, func(m *pb.Members) *[]int64 { return &m.TransferNs }),
	number(func(t *diagnosis.Member) *uint64 { return &t.MaxOwnNs }, func(m *pb.Members) *[]int64 { return &m.MaxOwnNs }),
}

var connColumns = []column[diagnosis.Conn, pb.Conns]{
	number(func(t *diagnosis.Conn) *int32 { return &t.Comm }, func(m *pb.Conns) *[]int64 { return &m.Comm }),
	number(func(t *diagnosis.Conn) *int32 { return &t.Src }, func(m *pb.Conns) *[]int64 { return &m.Src }),
	number(func(t *diagnosis.Conn) *int32 { return &t.Dst }, func(m *pb.Conns) *[]int64 { return &m.Dst }),
	number(func(t *diagnosis.Conn) *record.Transport { return &t.Transport }, func(m *pb.Conns) *[]int64 { return &m.Transport }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.Outstanding }, func(m *pb.Conns) *[]int64 { return &m.Outstanding }),
	moment(func(t *diagnosis.Conn) *int64 { return &t.LastPost }, func(m *pb.Conns) *[]int64 { return &m.LastPostAt }),
	moment(func(t *diagnosis.Conn) *int64 { return &t.LastCompletion }, func(m *pb.Conns) *[]int64 { return &m.LastCompletionAt }),
	moment(func(t *diagnosis.Conn) *int64 { return &t.TxBlockedSince }, func(m *pb.Conns) *[]int64 { return &m.TxBlockedSince }),
	moment(func(t *diagnosis.Conn) *int64 { return &t.RxWaitingSince }, func(m *pb.Conns) *[]int64 { return &m.RxWaitingSince }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.Windows }, func(m *pb.Conns) *[]int64 { return &m.Windows }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.SlowWindows }, func(m *pb.Conns) *[]int64 { return &m.SlowWindows }),
	double(func(t *diagnosis.Conn) *float64 { return &t.BytesPerSec }, func(m *pb.Conns) *[]int64 { return &m.BytesPerSec }),
	double(func(t *diagnosis.Conn) *float64 { return &t.LatencyNs }, func(m *pb.Conns) *[]int64 { return &m.LatencyNs }),
	number(func(t *diagnosis.Conn) *record.Cause { return &t.Cause }, func(m *pb.Conns) *[]int64 { return &m.Cause }),
	moment(func(t *diagnosis.Conn) *int64 { return &t.LastWindowAt }, func(m *pb.Conns) *[]int64 { return &m.LastWindowAt }),
	number(func(t *diagnosis.Conn) *record.LinkState { return &t.Link }, func(m *pb.Conns) *[]int64 { return &m.Link }),
	moment(func(t *diagnosis.Conn) *int64 { return &t.LinkAt }, func(m *pb.Conns) *[]int64 { return &m.LinkAt }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.Switches }, func(m *pb.Conns) *[]int64 { return &m.Switches }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.Outages }, func(m *pb.Conns) *[]int64 { return &m.Outages }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.Resent }, func(m *pb.Conns) *[]int64 { return &m.Resent }),
	number(func(t *diagnosis.Conn) *uint32 { return &t.QueuePair }, func(m *pb.Conns) *[]int64 { return &m.QueuePair }),
	number(func(t *diagnosis.Conn) *uint32 { return &t.PeerQueuePair }, func(m *pb.Conns) *[]int64 { return &m.PeerQueuePair }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.Address.High }, func(m *pb.Conns) *[]int64 { return &m.AddressHigh }),
	number(func(t *diagnosis.Conn) *uint64 { return &t.Address.Low }, func(m *pb.Conns) *[]int64 { return &m.AddressLow }),
	number(func(t *diagnosis.Conn) *uint16 { return &t.Rail }, func(m *pb.Conns) *[]int64 { return &m.Rail }),
	double(func(t *diagnosis.Conn) *float64 { return &t.RTTNs }, func(m *pb.Conns) *[]int64 { return &m.RttNs }),
}

var arrivalColumns = []column[arrival, pb.Arrivals]{
	number(func(t *arrival) *int32 { return &t.comm }, func(m *pb.Arrivals) *[]int64 { return &m.Comm }),
	number(func(t *arrival) *uint64 { return &t.seq }, func(m *pb.Arrivals) *[]int64 { return &m.Seq }),
	number(func(t *arrival) *record.CollKind { return &t.coll }, func(m *pb.Arrivals) *[]int64 { return &m.Coll }),
	number(func(t *arrival) *int32 { return &t.starts }, func(m *pb.Arrivals) *[]int64 { return &m.Starts }),
	number(func(t *arrival) *int32 { return &t.ends }, func(m *pb.Arrivals) *[]int64 { return &m.Ends }),
}

var timeColumns = []column[int64, pb.Times]{
	moment(func(t *int64) *int64 { return t }, func(m *pb.Times) *[]int64 { return &m.At }),
}
