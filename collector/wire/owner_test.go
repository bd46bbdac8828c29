package wire

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// The kernel prints user 0 for sockets that no process holds: that is not root.
func TestASocketWithoutAnOwnerIsNotRoots(t *testing.T) {
	local, remote := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("127.0.0.1:2")
	for row, want := range map[string]error{
		"0: 0100007F:0001 0100007F:0002 01 0:0 00:0 0 0 0 77 1": nil,
		"0: 0100007F:0001 0100007F:0002 01 0:0 00:0 0 0 0 0 1":  errNobody, // not accepted
		"0: 0100007F:0001 0100007F:0002 04 0:0 00:0 0 0 0 0 1":  errNobody, // FIN_WAIT1
		"0: 0100007F:0001 0100007F:0002 06 0:0 03:0 0 0 0 0 3":  errNobody, // TIME_WAIT
	} {
		_, found, err := ownerIn(strings.NewReader("heading\n"+row+"\n"), local, remote)
		if !errors.Is(err, want) || found != (want == nil) {
			t.Errorf("%s: found %v, %v, want %v", row, found, err, want)
		}
	}
}
