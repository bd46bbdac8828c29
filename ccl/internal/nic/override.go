package nic

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Override has a user's settings for NICs. The zero value has none.
type Override struct {
	text   string // the list as the user wrote it
	not    bool
	exact  bool
	match  []hca
	prefix netip.Prefix
}

// hca is one entry of the list. Port 0 is any port.
type hca struct {
	name string
	port int
}

// ParseOverride parses the two settings. hcas has the syntax of NCCL_IB_HCA: names with an optional
// port, comma-separated. A name is a prefix, unless the list begins with "=". A list that begins with "^"
// (or "^=") says which devices not to use. gid is the address or prefix of the GID to use.
func ParseOverride(hcas, gid string) (Override, error) {
	o := Override{text: hcas}
	list, not := strings.CutPrefix(strings.TrimSpace(hcas), "^")
	list, exact := strings.CutPrefix(list, "=")
	o.not, o.exact = not, exact
	if list == "" && hcas != "" {
		return Override{}, fmt.Errorf("NIC list %q: it names no device; write device names as in NCCL_IB_HCA, like =mlx5_0:1,mlx5_1", hcas)
	}
	for entry := range strings.SplitSeq(list, ",") {
		if list == "" {
			break
		}
		name, port, hasPort := strings.Cut(strings.TrimSpace(entry), ":")
		h := hca{name: name}
		if hasPort {
			n, err := strconv.ParseUint(port, 10, 8)
			if err != nil || n == 0 {
				return Override{}, fmt.Errorf("NIC list %q: port %q of %q is no number from 1 to 255", hcas, port, name)
			}
			h.port = int(n)
		}
		if h.name == "" {
			return Override{}, fmt.Errorf("NIC list %q: entry %q names no device", hcas, entry)
		}
		o.match = append(o.match, h)
	}
	if gid != "" {
		if addr, err := netip.ParseAddr(gid); err == nil {
			o.prefix = netip.PrefixFrom(addr.Unmap().WithZone(""), addr.Unmap().BitLen())
		} else if o.prefix, err = netip.ParsePrefix(gid); err != nil {
			return Override{}, fmt.Errorf("GID %q is neither an address nor a prefix like 10.1.0.0/16", gid)
		}
	}
	return o, nil
}

// allows reports whether the list allows a port.
func (o *Override) allows(device string, port int) bool {
	if len(o.match) == 0 {
		return true
	}
	for _, h := range o.match {
		named := h.name == device || !o.exact && strings.HasPrefix(device, h.name)
		if named && (h.port == 0 || h.port == port) {
			return !o.not
		}
	}
	return o.not
}
