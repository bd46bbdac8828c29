package verbs

import "fmt"

// name is names[v], or what with the number.
func name[T ~uint32 | ~uint8](names []string, v T, what string) string {
	if int(v) < len(names) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("%s %d", what, v)
}

// Status is enum ibv_wc_status.
type Status uint32

const (
	Success          Status = 0
	LocalLengthError Status = 1
	LocalQPError     Status = 2 // soft-RoCE also: the local link is down
	LocalProtection  Status = 4 // local memory is not registered like that
	Flushed          Status = 5 // the queue pair was in error already
	BadResponse      Status = 7
	LocalAccess      Status = 8
	RemoteInvalid    Status = 9
	RemoteAccess     Status = 10 // rkey, range or rights
	RemoteOperation  Status = 11
	RetriesExceeded  Status = 12 // no acknowledgement: the path or the peer is dead
	ReceiverNotReady Status = 13 // the peer had no receive posted for too long
	RemoteAborted    Status = 16
	FatalError       Status = 19
	ResponseTimeout  Status = 20
	GeneralError     Status = 21
)

var statuses = [...]string{"SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
	"BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR",
	"LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR", "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR",
	"GENERAL_ERR", "TM_ERR", "TM_RNDV_INCOMPLETE"}

// String is libibverbs' name without its prefix: "RETRY_EXC_ERR".
func (s Status) String() string { return name(statuses[:], s, "status") }

// Opcode is enum ibv_wc_opcode. It is undefined in a completion that failed.
type Opcode uint32

const (
	OpSend         Opcode = 0
	OpWrite        Opcode = 1
	OpReceive      Opcode = 128
	OpReceiveWrite Opcode = 129 // the peer's write with immediate
)

func (o Opcode) String() string {
	switch o {
	case OpSend:
		return "SEND"
	case OpWrite:
		return "RDMA_WRITE"
	case OpReceive:
		return "RECV"
	case OpReceiveWrite:
		return "RECV_RDMA_WITH_IMM"
	}
	return fmt.Sprintf("opcode %d", uint32(o))
}

// EventType is enum ibv_event_type.
type EventType uint32

const (
	EventCQError        EventType = 0 // overrun: the queue is unusable
	EventQPFatal        EventType = 1
	EventQPRequestError EventType = 2
	EventQPAccessError  EventType = 3
	EventEstablished    EventType = 4
	EventSendDrained    EventType = 5
	EventPathMigrated   EventType = 6
	EventMigrationError EventType = 7
	EventDeviceFatal    EventType = 8
	EventPortActive     EventType = 9
	EventPortError      EventType = 10
	EventLIDChange      EventType = 11
	EventPKeyChange     EventType = 12
	EventSMChange       EventType = 13
	EventLastWQE        EventType = 16 // of a queue pair with a shared receive queue
	EventReregister     EventType = 17
	EventGIDChange      EventType = 18
)

var eventTypes = [...]string{"CQ_ERR", "QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "COMM_EST", "SQ_DRAINED", "PATH_MIG", "PATH_MIG_ERR",
	"DEVICE_FATAL", "PORT_ACTIVE", "PORT_ERR", "LID_CHANGE", "PKEY_CHANGE", "SM_CHANGE", "SRQ_ERR", "SRQ_LIMIT_REACHED",
	"QP_LAST_WQE_REACHED", "CLIENT_REREGISTER", "GID_CHANGE", "WQ_FATAL"}

// String is libibverbs' name without its prefix: "PORT_ERR".
func (t EventType) String() string { return name(eventTypes[:], t, "event") }

// QPState is enum ibv_qp_state.
type QPState uint32

const (
	StateReset QPState = 0
	StateInit  QPState = 1
	StateRTR   QPState = 2
	StateRTS   QPState = 3
	StateSQD   QPState = 4
	StateSQE   QPState = 5
	StateError QPState = 6
)

func (s QPState) String() string {
	return name([]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}, s, "state")
}

// PortState is enum ibv_port_state; only PortActive carries traffic.
type PortState uint32

const (
	PortDown   PortState = 1
	PortInit   PortState = 2
	PortArmed  PortState = 3
	PortActive PortState = 4
)

func (s PortState) String() string {
	return name([]string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}, s, "port state")
}

// PhysicalState is the state of the port's link training.
type PhysicalState uint8

const (
	PhysicalPolling  PhysicalState = 2
	PhysicalDisabled PhysicalState = 3
	PhysicalLinkUp   PhysicalState = 5
)

// String is the kernel's word for it, as in sysfs' phys_state.
func (s PhysicalState) String() string {
	return name([]string{"", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp", "LinkErrorRecovery", "Phy Test"}, s, "physical state")
}

// LinkLayer is what the port's frames are.
type LinkLayer uint8

const (
	LinkUnspecified LinkLayer = 0 // from old kernels: InfiniBand
	LinkInfiniBand  LinkLayer = 1
	LinkEthernet    LinkLayer = 2
)

// String is the kernel's word for it, as in sysfs' link_layer.
func (l LinkLayer) String() string {
	return name([]string{"Unspecified", "InfiniBand", "Ethernet"}, l, "link layer")
}

// MTU is enum ibv_mtu, the payload of a packet.
type MTU uint32

const (
	MTU256  MTU = 1
	MTU512  MTU = 2
	MTU1024 MTU = 3
	MTU2048 MTU = 4
	MTU4096 MTU = 5
)

// Bytes is 0 for what is no MTU.
func (m MTU) Bytes() int {
	if m < MTU256 || m > MTU4096 {
		return 0
	}
	return 128 << m
}

func (m MTU) String() string { return fmt.Sprint(m.Bytes()) }

// GIDType is enum ibv_gid_type.
type GIDType uint32

const (
	GIDInfiniBand GIDType = 0
	GIDRoCEv1     GIDType = 1
	GIDRoCEv2     GIDType = 2
)

func (t GIDType) String() string { return name([]string{"IB", "RoCE v1", "RoCE v2"}, t, "GID type") }

// Access is a set of enum ibv_access_flags.
type Access uint32

const (
	LocalWrite   Access = 1 << 0
	RemoteWrite  Access = 1 << 1 // a memory region needs LocalWrite with it
	RemoteRead   Access = 1 << 2
	RemoteAtomic Access = 1 << 3
	// RelaxedOrdering lets PCIe reorder the device's writes into the region
	// until their completion is seen. Left out where the library is too old.
	RelaxedOrdering Access = 1 << 20
)
