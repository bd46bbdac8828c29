package verbs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestABI compares abi.h and the enumerations of this package with the
// installed header.
func TestABI(t *testing.T) {
	cc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no gcc")
	}
	compile := func(source string) (string, error) {
		out, err := exec.Command(cc, "-fsyntax-only", "-Wall", "-Werror", "-I", ".", source).CombinedOutput()
		return string(out), err
	}
	header := filepath.Join(t.TempDir(), "header.c")
	if err := os.WriteFile(header, []byte("#include <infiniband/verbs.h>\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := compile(header); err != nil {
		t.Skip("no <infiniband/verbs.h>: install libibverbs-dev")
	}
	if out, err := compile("testdata/abi_check.c"); err != nil {
		t.Errorf("abi.h disagrees with <infiniband/verbs.h>:\n%s", out)
	}

	var c strings.Builder
	c.WriteString("#include <infiniband/verbs.h>\n")
	value := func(prefix string, v uint32, name string) {
		fmt.Fprintf(&c, "_Static_assert(%s%s == %d, \"%s\");\n", prefix, name, v, name)
	}
	for i := range statuses {
		value("IBV_WC_", uint32(i), Status(i).String())
	}
	for i := range eventTypes {
		value("IBV_EVENT_", uint32(i), EventType(i).String())
	}
	for s := StateReset; s <= StateError; s++ {
		value("IBV_QPS_", uint32(s), s.String())
	}
	for s := PortDown; s <= PortActive; s++ {
		value("IBV_PORT_", uint32(s), s.String())
	}
	for _, o := range []Opcode{OpSend, OpWrite, OpReceive, OpReceiveWrite} {
		value("IBV_WC_", uint32(o), o.String())
	}
	for m := MTU256; m <= MTU4096; m++ {
		value("IBV_MTU_", uint32(m), m.String())
	}
	enums := filepath.Join(t.TempDir(), "enums.c")
	if err := os.WriteFile(enums, []byte(c.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := compile(enums); err != nil {
		t.Errorf("enums.go disagrees with <infiniband/verbs.h>:\n%s", out)
	}
}

// TestNames: each constant stands where its name is.
func TestNames(t *testing.T) {
	for _, c := range []struct {
		value fmt.Stringer
		want  string
	}{
		{Success, "SUCCESS"}, {LocalLengthError, "LOC_LEN_ERR"}, {LocalQPError, "LOC_QP_OP_ERR"}, {LocalProtection, "LOC_PROT_ERR"},
		{Flushed, "WR_FLUSH_ERR"}, {BadResponse, "BAD_RESP_ERR"}, {LocalAccess, "LOC_ACCESS_ERR"}, {RemoteInvalid, "REM_INV_REQ_ERR"},
		{RemoteAccess, "REM_ACCESS_ERR"}, {RemoteOperation, "REM_OP_ERR"}, {RetriesExceeded, "RETRY_EXC_ERR"}, {ReceiverNotReady, "RNR_RETRY_EXC_ERR"},
		{RemoteAborted, "REM_ABORT_ERR"}, {FatalError, "FATAL_ERR"}, {ResponseTimeout, "RESP_TIMEOUT_ERR"}, {GeneralError, "GENERAL_ERR"}, {Status(99), "status 99"},
		{EventCQError, "CQ_ERR"}, {EventQPFatal, "QP_FATAL"}, {EventQPRequestError, "QP_REQ_ERR"}, {EventQPAccessError, "QP_ACCESS_ERR"},
		{EventEstablished, "COMM_EST"}, {EventSendDrained, "SQ_DRAINED"}, {EventPathMigrated, "PATH_MIG"}, {EventMigrationError, "PATH_MIG_ERR"},
		{EventDeviceFatal, "DEVICE_FATAL"}, {EventPortActive, "PORT_ACTIVE"}, {EventPortError, "PORT_ERR"}, {EventLIDChange, "LID_CHANGE"},
		{EventPKeyChange, "PKEY_CHANGE"}, {EventSMChange, "SM_CHANGE"}, {EventLastWQE, "QP_LAST_WQE_REACHED"}, {EventReregister, "CLIENT_REREGISTER"},
		{EventGIDChange, "GID_CHANGE"}, {EventType(77), "event 77"},
		{Opcode(55), "opcode 55"}, {PortState(9), "port state 9"}, {PhysicalLinkUp, "LinkUp"}, {PhysicalDisabled, "Disabled"}, {PhysicalState(0), "physical state 0"},
		{LinkEthernet, "Ethernet"}, {LinkInfiniBand, "InfiniBand"}, {GIDRoCEv2, "RoCE v2"}, {GIDInfiniBand, "IB"}, {MTU(9), "0"},
		{Event{Type: EventPortError, Port: 2}, "PORT_ERR of port 2"}, {Event{Type: EventQPFatal, QP: 9}, "QP_FATAL of queue pair 9"},
		{Event{Type: EventCQError, CQ: 3}, "CQ_ERR of completion queue 3"}, {Event{Type: EventDeviceFatal}, "DEVICE_FATAL"},
	} {
		if got := c.value.String(); got != c.want {
			t.Errorf("%T %+v: %q, want %q", c.value, c.value, got, c.want)
		}
	}
	for speed, want := range map[[2]int]float64{{1, 1}: 2.5, {32, 2}: 100, {64, 2}: 200, {128, 2}: 400, {256, 2}: 800, {128, 16}: 200, {7, 2}: 0} {
		if got := (PortAttr{Speed: laneRate(uint32(speed[0])), Width: lanes(uint8(speed[1]))}).Rate(); got != want {
			t.Errorf("speed %d, width %d: %v Gbit/s, want %v", speed[0], speed[1], got, want)
		}
	}
}
