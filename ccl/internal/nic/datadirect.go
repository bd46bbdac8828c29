package nic

import (
	"encoding/binary"
	"fmt"
	"path"
)

// dataDirectFunction is the PCIe device number of the function that a Direct NIC
// (ConnectX-8) has for data alone: drivers/infiniband/hw/mlx5/data_direct.c.
const dataDirectFunction = "0x2100"

// dataDirect finds data functions by the card's serial number. It ignores cards with several functions
// of either kind. SetDataDirect can name those.
func (r reader) dataDirect(t *Tree) {
	functions := map[string][]string{} // serial number → bus ids
	for id := range t.pci {
		if r.text(pciAll, id, "vendor") == vendorNIC && r.text(pciAll, id, "device") == dataDirectFunction {
			if serial := r.serial(id); serial != "" {
				functions[serial] = append(functions[serial], id)
			}
		}
	}
	if len(functions) == 0 {
		return
	}
	owners := map[string][]*Device{}
	for i := range t.Devices {
		d := &t.Devices[i]
		if serial := r.serial(d.BusID); serial != "" && d.VirtualOf == "" {
			owners[serial] = append(owners[serial], d)
		}
	}
	for serial, ids := range functions {
		if ds := owners[serial]; len(ids) == 1 && len(ds) == 1 {
			at := t.pci[ids[0]]
			ds[0].DataDirect, ds[0].data = ids[0], &at
		}
	}
}

// serial returns a function's serial number from its vital product data, which only root may read.
func (r reader) serial(busID string) string {
	if busID == "" {
		return ""
	}
	return serialNumber([]byte(r.raw(path.Join(pciAll, busID, "vpd"))))
}

// serialNumber returns the SN keyword of vital product data (PCI Local Bus Specification 3.0, appendix
// I). It is in the large resource with tag 0x90.
func serialNumber(vpd []byte) string {
	for len(vpd) >= 3 && vpd[0]&0x80 != 0 {
		n := int(binary.LittleEndian.Uint16(vpd[1:]))
		if n > len(vpd)-3 {
			return ""
		}
		tag, body := vpd[0], vpd[3:3+n]
		vpd = vpd[3+n:]
		if tag != 0x90 {
			continue
		}
		for len(body) >= 3 {
			n := int(body[2])
			if n > len(body)-3 {
				return ""
			}
			if string(body[:2]) == "SN" {
				return fmt.Sprintf("%q", body[3:3+n])
			}
			body = body[3+n:]
		}
	}
	return ""
}
