package pressure

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxFile bounds what is read of one file.
	maxFile = 4096
	// maxDepth bounds the cgroups above a process's own that are looked at.
	maxDepth = 16
	// maxDirs bounds the cgroups that are looked at, once, to find the program's own.
	maxDirs = 50_000
)

// hierarchy is where cgroups are mounted.
type hierarchy struct {
	unified tree // v2: all controllers, or, beside v1, those that v1 does not have
	cpu     tree // v1's CPU controller
}

// tree is one mounted hierarchy.
type tree struct {
	top string // "" for none
	// base is what paths in /proc/PID/cgroup are relative to, below top: the root of this program's
	// cgroup namespace.
	base string
	lost bool // top has no such directory: only what lies above is elsewhere
}

// hostCgroups are where a container may see all cgroups of its node: a mount of the host's
// /sys/fs/cgroup, or, with the host's processes, that of process 1.
func hostCgroups(proc string) []string {
	return []string{"/host/sys/fs/cgroup", filepath.Join(proc, "1/root/sys/fs/cgroup")}
}

// findHierarchy looks at the usual places (systemd's), of v2, v1, and both: below own, and below
// the first of hosts that can be read, which shows more when this program is in a container.
func findHierarchy(proc, own string, hosts ...string) hierarchy {
	h, n := mounted(own)
	for _, host := range hosts {
		all, m := mounted(host)
		if m == 0 {
			continue
		}
		self, _ := read(filepath.Join(proc, "self", "cgroup"))
		all.unified.locate(h.unified.top, groupOf(string(self), ""))
		all.cpu.locate(h.cpu.top, groupOf(string(self), "cpu"))
		if m >= n && !all.unified.lost && !all.cpu.lost {
			return all
		}
	}
	return h
}

// mounted finds the hierarchies below root, and how many there are.
func mounted(root string) (h hierarchy, n int) {
	for _, dir := range []string{root, filepath.Join(root, "unified")} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err == nil {
			h.unified.top = dir
			n++
			break
		}
	}
	for _, dir := range []string{filepath.Join(root, "cpu"), filepath.Join(root, "cpu,cpuacct"), filepath.Join(root, "cpuacct,cpu")} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
			h.cpu.top = dir
			n++
			break
		}
	}
	return h, n
}

// locate finds the root of this program's cgroup namespace in the tree. The program's own view of
// the hierarchy is mounted at own, and it is in cgroup self, as its namespace names it. A container's
// own view is its own cgroup: where the tree has that under self's name, names are the host's.
func (t *tree) locate(own, self string) {
	if t.top == "" || own == "" || same(t.top, own) || self != "" && same(filepath.Join(t.top, self), own) {
		return
	}
	t.lost = true
	left := maxDirs
	_ = filepath.WalkDir(t.top, func(dir string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return fs.SkipDir // it went away meanwhile
		case !d.IsDir():
			return nil
		case left == 0:
			return fs.SkipAll
		case same(dir, own):
			t.base, t.lost = strings.TrimPrefix(dir, t.top), false
			return fs.SkipAll
		}
		left--
		return nil
	})
}

// same reports whether two paths are one directory.
func same(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// groupOf is the cgroup of a v1 controller in /proc/PID/cgroup, or of v2 for "".
func groupOf(text, controller string) string {
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) == 3 && (controller == "" && f[1] == "" && f[0] == "0" || controller != "" && slices.Contains(strings.Split(f[1], ","), controller)) {
			return f[2]
		}
	}
	return ""
}

func (h hierarchy) none() bool { return h.unified.top == "" && h.cpu.top == "" }

// groups is what is known of a process's cgroups.
type groups struct {
	limited []limited // those with a quota, its own first
	own     string    // v2's, for its memory pressure; "" for none
	outside bool      // they are not shown here
}

// limited is one cgroup with a CPU quota.
type limited struct {
	dir     string
	samples [window + 1]cpuStat // ring
	n       int
}

// cpuStat is what cpu.stat says of a quota.
type cpuStat struct {
	at                 int64
	periods, throttled uint64
	ns                 uint64 // throttled, on all CPUs together
}

// survey finds the process's cgroup and those above it that have a quota.
func (g *groups) survey(h hierarchy, dir string) {
	text, err := read(filepath.Join(dir, "cgroup"))
	if err != nil {
		return
	}
	var found []limited
	g.own, g.outside = "", false
	for _, v2 := range []bool{true, false} {
		tree, controller := h.cpu, "cpu"
		if v2 {
			tree, controller = h.unified, ""
		}
		group := groupOf(string(text), controller)
		if group == "" {
			continue
		}
		own, ok := tree.inside(group)
		if !ok {
			g.outside = g.outside || tree.top != ""
			continue
		}
		if v2 {
			g.own = own
		}
		for d, depth := own, 0; depth < maxDepth; d, depth = filepath.Dir(d), depth+1 {
			if hasQuota(d) {
				l := limited{dir: d}
				if i := slices.IndexFunc(g.limited, func(o limited) bool { return o.dir == d }); i >= 0 {
					l = g.limited[i]
				}
				found = append(found, l)
			}
			if d == tree.top {
				break
			}
		}
	}
	g.limited = found
}

// inside is the directory of a cgroup. Of one that is not shown here there is none.
func (t tree) inside(group string) (dir string, ok bool) {
	if t.top == "" || !filepath.IsAbs(group) {
		return "", false
	}
	// Groups outside of the namespace begin with /.., as often as it takes.
	up := 0
	for part := range strings.SplitSeq(group, "/") {
		if part == ".." {
			up++
		}
	}
	if up > strings.Count(t.base, "/") {
		return "", false
	}
	return filepath.Join(t.top, filepath.Join("/", t.base, group)), true
}

// hasQuota reports whether a cgroup limits the CPU time of what is in it.
func hasQuota(dir string) bool {
	if text, err := read(filepath.Join(dir, "cpu.max")); err == nil {
		return !bytes.HasPrefix(text, []byte("max"))
	}
	text, err := read(filepath.Join(dir, "cpu.cfs_quota_us"))
	return err == nil && !bytes.HasPrefix(text, []byte("-"))
}

// throttled is the share of the window in which a quota held the process back, the worst of all.
func (g *groups) throttled(c *cache, now int64) (worst float32) {
	for i := range g.limited {
		l := &g.limited[i]
		s, ok := c.cpuStat(l.dir)
		if !ok {
			l.n = 0
			continue
		}
		s.at = now
		worst = max(worst, l.add(s))
	}
	return worst
}

// add takes in a sample and returns the share. The kernel adds up the time of all CPUs, so that
// several threads count several times: it is no more than the share of periods in which the
// group was throttled at all.
func (l *limited) add(s cpuStat) float32 {
	if l.n > 0 {
		last := l.samples[(l.n-1)%(window+1)]
		if s.at <= last.at || s.periods < last.periods || s.throttled < last.throttled || s.ns < last.ns {
			l.n = 0 // another cgroup of the same name
		}
	}
	l.samples[l.n%(window+1)] = s
	l.n++
	if l.n < 2 {
		return 0
	}
	o := l.samples[max(0, l.n-1-window)%(window+1)]
	periods := s.periods - o.periods
	if periods == 0 {
		return 0
	}
	share := min(float64(s.ns-o.ns)/float64(s.at-o.at), float64(s.throttled-o.throttled)/float64(periods), 1)
	return float32(share)
}

// memory is the memory pressure of the process's cgroup.
func (g *groups) memory(c *cache) float32 {
	if g.own == "" {
		return 0
	}
	return c.memory(g.own)
}

// cache is what one look has read of cgroups, which processes share.
type cache struct {
	stats map[string]cpuStat
	some  map[string]float32
}

func newCache() *cache { return &cache{map[string]cpuStat{}, map[string]float32{}} }

func (c *cache) memory(dir string) float32 {
	if x, ok := c.some[dir]; ok {
		return x
	}
	x, _ := some(filepath.Join(dir, "memory.pressure")) // not every kernel and not every cgroup has it
	c.some[dir] = x
	return x
}

func (c *cache) cpuStat(dir string) (s cpuStat, ok bool) {
	if s, ok = c.stats[dir]; ok {
		return s, true
	}
	text, err := read(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return s, false
	}
	for line := range bytes.Lines(text) {
		key, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		n, err := strconv.ParseUint(string(value), 10, 63)
		if err != nil {
			continue
		}
		switch string(key) {
		case "nr_periods":
			s.periods = n
		case "nr_throttled":
			s.throttled = n
		case "throttled_usec": // v2
			s.ns = n * 1000
		case "throttled_time": // v1
			s.ns = n
		}
	}
	c.stats[dir] = s
	return s, true
}

// some reads the share of ten seconds in which some task waited, of a PSI file.
func some(path string) (float32, error) {
	text, err := read(path)
	if err != nil {
		return 0, err
	}
	_, rest, ok := bytes.Cut(text, []byte("some avg10="))
	number, _, _ := bytes.Cut(rest, []byte(" "))
	percent, err := strconv.ParseFloat(string(number), 32)
	if !ok || err != nil || !(percent >= 0 && percent <= 100) {
		return 0, errNone
	}
	return float32(percent / 100), nil
}

// read reads the beginning of a file.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxFile))
}
