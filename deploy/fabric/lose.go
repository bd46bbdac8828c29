package fabric

import (
	"errors"
	"fmt"
	"math"
	"net"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// Lose has a link lose a share of its packets at random, without anybody being told: up is
// the direction from the leaf to the spine. well ends that. It needs root and XDP.
func (u *Up) Lose(l, s int, up bool, share float64) (well func() error, err error) {
	ns, dev := u.spine(s), fmt.Sprintf("l%d", l) // where it arrives
	if !up {
		ns, dev = u.leaf(l), fmt.Sprintf("s%d", s)
	}
	const drop, pass = 1, 2 // XDP_DROP, XDP_PASS
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{
		asm.FnGetPrandomU32.Call(),
		asm.LSh.Imm(asm.R0, 32), asm.RSh.Imm(asm.R0, 32),
		asm.LoadImm(asm.R1, int64(share*math.MaxUint32), asm.DWord),
		asm.JLT.Reg(asm.R0, asm.R1, "lost"),
		asm.Mov.Imm(asm.R0, pass), asm.Return(),
		asm.Mov.Imm(asm.R0, drop).WithSymbol("lost"), asm.Return(),
	}})
	if err != nil {
		return nil, fmt.Errorf("fabric %s: a program that loses packets: %w", u.Name, err)
	}
	var at link.Link
	if err := Enter(ns, func() error {
		i, err := net.InterfaceByName(dev)
		if err == nil {
			at, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: i.Index, Flags: link.XDPGenericMode})
		}
		return err
	}); err != nil {
		return nil, errors.Join(fmt.Errorf("fabric %s: have %s in %s lose packets: %w", u.Name, dev, ns, err), program.Close())
	}
	return func() error { return errors.Join(at.Close(), program.Close()) }, nil
}

// Slow gives a link, both ways, a share of its rate, without anybody being told; 1 is all of it again.
func (u *Up) Slow(l, s int, share float64) error {
	rate := int(share * 1000 * float64(u.Rate)) // kbit/s
	return errors.Join(
		batch("tc", u.leaf(l), []string{classesOf("change", fmt.Sprintf("s%d", s), rate)}),
		batch("tc", u.spine(s), []string{classesOf("change", fmt.Sprintf("l%d", l), rate)}))
}
