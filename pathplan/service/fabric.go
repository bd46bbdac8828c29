package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// Fabric is a topology, and by which addresses switches answer probes.
type Fabric struct {
	pathplan.Topology
	// Interfaces are the switches' interfaces between leaves and spines: the address of the
	// end to which a link leads. A switch answers with the one by which a probe came in.
	Interfaces []Interface `json:"interfaces"`

	nics  map[netip.Addr]pathplan.NIC
	addrs map[pathplan.Link]netip.Addr
	links map[netip.Addr]pathplan.Link
}

// Interface is the far end of a link.
type Interface struct {
	pathplan.Link
	Addr netip.Addr `json:"addr"`
}

// maxFabric bounds a fabric's file.
const maxFabric = 256 << 20

// ReadFabric reads a fabric from a JSON file. What it does not know is an error.
func ReadFabric(file string) (f Fabric, err error) {
	fi, err := os.Stat(file)
	if err != nil {
		return f, fmt.Errorf("fabric: %w", err)
	}
	if fi.Size() > maxFabric {
		return f, fmt.Errorf("fabric: %s has %d bytes, at most %d are read", file, fi.Size(), maxFabric)
	}
	r, err := os.Open(file)
	if err != nil {
		return f, fmt.Errorf("fabric: %w", err)
	}
	defer r.Close()
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return f, fmt.Errorf("fabric: %s: %w", file, err)
	}
	if err := f.check(); err != nil {
		return f, fmt.Errorf("fabric: %s: %w", file, err)
	}
	return f, nil
}

// check makes the fabric's tables.
func (f *Fabric) check() error {
	if err := f.Topology.Check(); err != nil {
		return err
	}
	known := map[pathplan.Link]bool{}
	for _, l := range f.Topology.Links {
		known[l.Link] = true
	}
	f.nics, f.addrs, f.links = map[netip.Addr]pathplan.NIC{}, map[pathplan.Link]netip.Addr{}, map[netip.Addr]pathplan.Link{}
	var errs []error
	for _, p := range f.Ports {
		if p.Addr == "" {
			continue
		}
		a, err := netip.ParseAddr(p.Addr)
		if old, ok := f.nics[a]; err != nil || ok && old != p.NIC {
			errs = append(errs, fmt.Errorf("port %s: address %q is none, or is %s's", p.Port, p.Addr, old))
		}
		f.nics[a] = p.NIC
	}
	for _, i := range f.Interfaces {
		if _, twice := f.links[i.Addr]; !known[i.Link] || !i.Addr.IsValid() || twice {
			errs = append(errs, fmt.Errorf("interface %s of %s: want a link of the fabric, and an address of its own", i.Addr, i.Link))
		}
		f.addrs[i.Link], f.links[i.Addr] = i.Addr, i.Link
	}
	if len(errs) == 0 && len(f.addrs) < len(known) {
		errs = append(errs, fmt.Errorf("%d links, and interfaces of %d: each needs the address by which its far end answers", len(known), len(f.addrs)))
	}
	return errors.Join(errs...)
}

// hops are the addresses by which a path answers.
func (f *Fabric) hops(p pathplan.Path) (spine, leaf string) {
	return f.addrs[p.Up].String(), f.addrs[p.Down].String()
}

// link is the one that leads to an address.
func (f *Fabric) link(addr string) (pathplan.Link, bool) {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return pathplan.Link{}, false
	}
	l, ok := f.links[a]
	return l, ok
}
