package nic

import (
	"cmp"
	"net"
	"net/netip"
	"os"
)

// Host reads this machine's tree, and the subnets of its interfaces. SYSFS_PATH names the mount point
// of sysfs if that is not /sys, as for libibverbs.
func Host() (*Tree, error) {
	t, err := Read(os.DirFS(cmp.Or(os.Getenv("SYSFS_PATH"), "/sys")))
	if err != nil {
		return nil, err
	}
	t.SetSubnets(func(netdev string) []netip.Prefix {
		i, err := net.InterfaceByName(netdev)
		if err != nil {
			return nil // it is in another network namespace
		}
		addrs, err := i.Addrs()
		if err != nil {
			return nil
		}
		var out []netip.Prefix
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok {
				addr, _ := netip.AddrFromSlice(n.IP)
				bits, _ := n.Mask.Size()
				out = append(out, netip.PrefixFrom(addr.Unmap(), bits))
			}
		}
		return out
	})
	return t, nil
}
