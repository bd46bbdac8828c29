package proc

import (
	"slices"
	"syscall"

	"github.com/prometheus/procfs"
)

// byStart lists all processes by when they started.
func (s *Source) byStart() map[uint64][]int {
	all := map[uint64][]int{}
	procs, _ := s.fs.AllProcs() // none: what is sought is not found
	for _, p := range procs {
		if st, err := p.Stat(); err == nil {
			all[st.Starttime] = append(all[st.Starttime], p.PID)
		}
	}
	return all
}

// inside returns those of the processes that have the target's pid in their own
// namespace, and of several such the one that maps its recorder.
func (s *Source) inside(pids []int, t *target) (found []int) {
	for _, pid := range pids {
		if o, err := s.fs.Proc(pid); err == nil {
			if st, err := o.NewStatus(); err == nil && len(st.NSpids) > 1 && st.NSpids[len(st.NSpids)-1] == uint64(t.inner) {
				found = append(found, pid)
			}
		}
	}
	if len(found) > 1 {
		if i := slices.IndexFunc(found, func(pid int) bool { return s.maps(pid, t.path) }); i >= 0 {
			return found[i : i+1]
		}
	}
	return found
}

// maps reports whether a process has mapped a file.
func (s *Source) maps(pid int, path string) bool {
	var file syscall.Stat_t
	p, err := s.fs.Proc(pid)
	if err != nil || syscall.Stat(path, &file) != nil {
		return false
	}
	maps, err := p.ProcMaps()
	return err == nil && slices.ContainsFunc(maps, func(m *procfs.ProcMap) bool { return m.Inode == file.Ino && m.Dev == file.Dev })
}
