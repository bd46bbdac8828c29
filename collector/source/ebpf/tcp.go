package ebpf

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const (
	inet  = 2  // AF_INET
	inet6 = 10 // AF_INET6

	// maxSockets bounds the sockets of a network namespace that are read, maxFDs a process's files.
	maxSockets, maxFDs = 1 << 16, 1 << 14
)

// resentBy is how many segments the connections of processes have sent again since the last look.
// The kernel tells of connections, /proc whose they are; that is read only when there is news.
func (w *waits) resentBy(pids []int) map[int]uint32 {
	var c waitsConnection
	var n uint64
	news := map[waitsConnection]uint32{}
	seen := map[waitsConnection]uint64{}
	each := w.objs.Resent.Iterate()
	for each.Next(&c, &n) {
		seen[c] = n
		if was := w.sent[c]; n > was {
			news[c] = uint32(n - was)
		}
	}
	w.sent = seen
	by := map[int]uint32{}
	if len(news) == 0 {
		return by
	}
	inNamespace := map[string]map[string]uint32{} // segments by socket's inode, by network namespace
	for _, pid := range pids {
		dir := filepath.Join(w.proc, strconv.Itoa(pid))
		ns, err := os.Readlink(filepath.Join(dir, "ns", "net"))
		if err != nil {
			continue
		}
		sockets, ok := inNamespace[ns]
		if !ok {
			sockets = socketsOf(dir, news)
			inNamespace[ns] = sockets
		}
		if len(sockets) > 0 {
			by[pid] = segments(dir, sockets)
		}
	}
	return by
}

// socketsOf finds the inodes of connections in a process's network namespace.
func socketsOf(dir string, news map[waitsConnection]uint32) map[string]uint32 {
	sockets := map[string]uint32{}
	for _, file := range []struct {
		name   string
		family uint16
	}{{"tcp", inet}, {"tcp6", inet6}} {
		f, err := os.Open(filepath.Join(dir, "net", file.name))
		if err != nil {
			continue
		}
		lines := bufio.NewScanner(f)
		for i := 0; lines.Scan() && i < maxSockets; i++ {
			fields := strings.Fields(lines.Text()) // sl, local, remote, state, queues, timer, retransmits, uid, timeout, inode
			if len(fields) < 10 {
				continue
			}
			c := waitsConnection{Family: file.family}
			var ok1, ok2 bool
			c.Local, c.LocalPort, ok1 = endpoint(fields[1])
			c.Remote, c.RemotePort, ok2 = endpoint(fields[2])
			if n := news[c]; ok1 && ok2 && n > 0 {
				sockets[fields[9]] += n
			}
		}
		f.Close()
	}
	return sockets
}

// endpoint reads an address of /proc/net/tcp: words of the host's byte order in hex, and a port.
func endpoint(text string) (address [16]byte, port uint16, ok bool) {
	a, p, found := strings.Cut(text, ":")
	raw, err := hex.DecodeString(a)
	n, e := strconv.ParseUint(p, 16, 16)
	if !found || err != nil || e != nil || len(raw) != 4 && len(raw) != 16 {
		return address, 0, false
	}
	for i := range raw {
		address[i] = raw[i&^3+3-i&3]
	}
	return address, uint16(n), true
}

// segments adds up those of a process's own sockets.
func segments(dir string, sockets map[string]uint32) (sum uint32) {
	f, err := os.Open(filepath.Join(dir, "fd"))
	if err != nil {
		return 0
	}
	defer f.Close()
	names, _ := f.Readdirnames(maxFDs) // what there is
	for _, name := range names {
		target, err := os.Readlink(filepath.Join(dir, "fd", name))
		if err != nil {
			continue
		}
		var inode uint64
		if _, err := fmt.Sscanf(target, "socket:[%d]", &inode); err == nil {
			sum += sockets[strconv.FormatUint(inode, 10)]
		}
	}
	return sum
}
