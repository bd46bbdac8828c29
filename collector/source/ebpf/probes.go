package ebpf

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
)

// What keeps this source from working. Update's errors wrap one of these, with what is missing.
var (
	ErrNotPermitted = errors.New("this process may not use eBPF")
	ErrNotSupported = errors.New("this kernel lacks what it takes")
	ErrNotHost      = errors.New("the agent is in a PID namespace of its own")
)

// missing names an error for a label.
func missing(err error) string {
	switch {
	case errors.Is(err, ErrNotPermitted):
		return "not_permitted"
	case errors.Is(err, ErrNotSupported):
		return "not_supported"
	case errors.Is(err, ErrNotHost):
		return "pid_namespace"
	}
	return "failed"
}

// probes is the programs, their maps, and where they are attached.
type probes struct {
	calls callsObjects
	multi bool // one link holds all probes of a library
	exits link.Link
	exit  error // why the ends of processes are not heard of
	on    map[libraryID][]link.Link
}

// loadProbes loads the programs. sample is a power of two: of a communicator's calls every
// so-manieth is recorded.
func loadProbes(sample uint64) (*probes, error) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return nil, fmt.Errorf("%w: calls of %s machines are not known", ErrNotSupported, runtime.GOARCH)
	}
	_ = rlimit.RemoveMemlock() // before 5.11 maps count as locked memory; if that matters loading fails, and says so
	spec, err := loadCalls()
	if err != nil {
		return nil, fmt.Errorf("ebpf: programs: %w", err)
	}
	if err := spec.Variables["sample_mask"].Set(sample - 1); err != nil {
		return nil, fmt.Errorf("ebpf: sampling: %w", err)
	}
	p := &probes{multi: features.HaveBPFLinkUprobeMulti() == nil, on: map[libraryID][]link.Link{}}
	for _, prog := range spec.Programs {
		if prog.Type == ebpf.Kprobe && p.multi {
			prog.AttachType = ebpf.AttachTraceUprobeMulti
		}
	}
	if err := spec.LoadAndAssign(&p.calls, nil); err != nil {
		return nil, fmt.Errorf("ebpf: load: %w", why(err))
	}
	if p.exits, p.exit = link.AttachRawTracepoint(link.RawTracepointOptions{Name: "sched_process_exit", Program: p.calls.ProcessExit}); p.exit != nil {
		p.exit = fmt.Errorf("ends of processes: %w", why(p.exit))
	}
	return p, nil
}

// why wraps an error of the kernel in what it means.
func why(err error) error {
	switch {
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%w (it takes CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN before Linux 5.8): %w", ErrNotPermitted, err)
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, link.ErrNotSupported), errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrNotSupported, err)
	}
	return err
}

// attach puts probes on a library, when there are none.
func (p *probes) attach(path string) (libraryID, error) {
	file, id, err := open(path)
	if err != nil {
		return id, err
	}
	defer file.Close()
	if _, ok := p.on[id]; ok {
		return id, nil
	}
	offsets, err := symbols(file)
	if err != nil {
		return id, fmt.Errorf("%s: %w", path, err)
	}
	if m := machine(file); m != "" && m != runtime.GOARCH {
		return id, fmt.Errorf("%s: it is for %s: %w", path, m, ErrNotLibrary)
	}
	// By the open file: what has the name may be another one by now.
	exe, err := link.OpenExecutable(fmt.Sprintf("/proc/self/fd/%d", file.Fd()))
	if err != nil {
		return id, fmt.Errorf("%s: %w", path, err)
	}
	links, err := p.attachAll(exe, offsets)
	if err != nil {
		return id, errors.Join(fmt.Errorf("probes on %s: %w", path, why(err)), closeAll(links))
	}
	p.on[id] = links
	return id, nil
}

// machine is whose instructions a library has, by GOARCH's names; "" for another.
func machine(file *os.File) string {
	var head [20]byte
	if _, err := file.ReadAt(head[:], 0); err != nil || !bytes.HasPrefix(head[:], []byte(elf.ELFMAG)) {
		return ""
	}
	switch elf.Machine(uint16(head[18]) | uint16(head[19])<<8) {
	case elf.EM_X86_64:
		return "amd64"
	case elf.EM_AARCH64:
		return "arm64"
	}
	return "another machine"
}

// target is one program's probes.
type target struct {
	returns  bool
	offsets  []uint64
	cookies  []uint64
	programs string
}

// attachAll puts a probe on each function's entry, and on the returns of those that have
// something to tell then. Several names of one function are one. Returns come first: a call whose
// entry alone is seen would look as if it never returned.
func (p *probes) attachAll(exe *link.Executable, offsets map[string]uint64) (links []link.Link, err error) {
	byProgram := map[string]*target{}
	taken := map[uint64]bool{}
	for i := range functions {
		f := &functions[i]
		off, ok := offsets[f.name]
		if !ok || taken[off] {
			continue
		}
		taken[off] = true
		for _, t := range []struct {
			program string
			returns bool
		}{{f.enter, false}, {f.leave, true}} {
			if t.program == "" {
				continue
			}
			to := byProgram[t.program]
			if to == nil {
				to = &target{returns: t.returns, programs: t.program}
				byProgram[t.program] = to
			}
			to.offsets, to.cookies = append(to.offsets, off), append(to.cookies, f.cookie())
		}
	}
	all := make([]*target, 0, len(byProgram))
	for _, t := range byProgram {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b *target) int {
		switch {
		case a.returns == b.returns:
			return 0
		case a.returns:
			return -1
		}
		return 1
	})
	for _, t := range all {
		l, err := p.attachTarget(exe, t)
		links = append(links, l...)
		if err != nil {
			return links, err
		}
	}
	return links, nil
}

func (p *probes) attachTarget(exe *link.Executable, t *target) (links []link.Link, err error) {
	prog := p.program(t.programs)
	if p.multi {
		o := &link.UprobeMultiOptions{Addresses: t.offsets, Cookies: t.cookies}
		var l link.Link
		if t.returns {
			l, err = exe.UretprobeMulti(nil, prog, o)
		} else {
			l, err = exe.UprobeMulti(nil, prog, o)
		}
		if err != nil {
			return nil, err
		}
		return []link.Link{l}, nil
	}
	for i := range t.offsets {
		o := &link.UprobeOptions{Address: t.offsets[i], Cookie: t.cookies[i]}
		var l link.Link
		if t.returns {
			l, err = exe.Uretprobe("", prog, o)
		} else {
			l, err = exe.Uprobe("", prog, o)
		}
		if err != nil {
			return links, err
		}
		links = append(links, l)
	}
	return links, nil
}

func (p *probes) program(name string) *ebpf.Program {
	c := &p.calls.callsPrograms
	return map[string]*ebpf.Program{
		callsProgCallEnter: c.CallEnter, callsProgCallReturn: c.CallReturn,
		callsProgGroupStart: c.GroupStart, callsProgGroupEnd: c.GroupEnd, callsProgGroupEndReturn: c.GroupEndReturn,
		callsProgInitEnter: c.InitEnter, callsProgInitReturn: c.InitReturn,
		callsProgSplitEnter: c.SplitEnter, callsProgShrinkEnter: c.ShrinkEnter, callsProgInitAllEnter: c.InitAllEnter, callsProgLeaveEnter: c.LeaveEnter,
	}[name]
}

// detach takes the probes off a library that nobody has mapped any more: they would keep its
// file system from being unmounted.
func (p *probes) detach(id libraryID) error {
	links := p.on[id]
	delete(p.on, id)
	return closeAll(links)
}

func closeAll(links []link.Link) error {
	var errs []error
	for _, l := range links {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

func (p *probes) close() error {
	var errs []error
	for id := range p.on {
		errs = append(errs, p.detach(id))
	}
	if p.exits != nil {
		errs = append(errs, p.exits.Close())
	}
	return errors.Join(append(errs, p.calls.Close())...)
}

// stats adds up the programs' counters.
func (p *probes) stats() (sum [callsStatNSTATS]uint64) {
	for i := range sum {
		var each []uint64
		if err := p.calls.Stats.Lookup(callsStat(i), &each); err != nil {
			continue
		}
		for _, n := range each {
			sum[i] += n
		}
	}
	return sum
}
