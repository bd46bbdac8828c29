package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// listening returns the ports that processes of a session listen on. Others on this host, of other
// tests that run meanwhile, are none of the attackers' business.
func listening(t *testing.T, session int) map[int]bool {
	t.Helper()
	f, err := os.Open("/proc/self/net/tcp")
	if err != nil {
		t.Error(err)
		return nil
	}
	defer f.Close()
	inodes := socketsOf(session)
	ports := map[int]bool{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		w := strings.Fields(lines.Text())
		if len(w) < 10 || w[3] != "0A" || !inodes[w[9]] {
			continue
		}
		_, port, _ := strings.Cut(w[1], ":")
		if b, err := hex.DecodeString(port); err == nil && len(b) == 2 {
			ports[int(b[0])<<8|int(b[1])] = true
		}
	}
	return ports
}

// socketsOf are the inodes of the sockets that processes of a session have.
func socketsOf(session int) map[string]bool {
	inodes := map[string]bool{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// The name, in brackets, may hold anything; the session is the fourth word after it.
		w := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(w) < 4 || w[3] != fmt.Sprint(session) {
			continue
		}
		fds, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "fd", "*"))
		for _, fd := range fds {
			to, _ := os.Readlink(fd)
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				inodes[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	return inodes
}

// scan connects again and again to each port that a session's processes open, silent or with
// garbage, and keeps the connections, until stop is called; it returns to how many ports.
func scan(t *testing.T, session int) (stop func() (ports int)) {
	t.Helper()
	quit := make(chan struct{})
	found := map[int]bool{}
	var done sync.WaitGroup
	done.Go(func() {
		var conns []net.Conn
		defer func() {
			for _, c := range conns {
				c.Close()
			}
		}()
		for n := 0; ; n++ {
			select {
			case <-quit:
				return
			default:
			}
			for port := range listening(t, session) {
				found[port] = true
				for i := range 10 {
					c, err := net.DialTimeout("tcp", fmt.Sprint("127.0.0.1:", port), time.Second)
					if err != nil {
						break
					}
					if i%2 == 0 {
						_, _ = c.Write([]byte("\x00\xff garbage, whatever is spoken here\r\n\r\n"))
					}
					if conns = append(conns, c); len(conns) > 600 {
						conns[0].Close()
						conns = conns[1:]
					}
				}
			}
			time.Sleep(2 * time.Millisecond)
		}
	})
	return func() int { close(quit); done.Wait(); return len(found) }
}

// rendezvousFlood connects to all ports that a job's ranks open, and a preflight check's,
// while they meet: they meet all the same.
func rendezvousFlood(t *testing.T, w *town) {
	for name, args := range map[string][]string{
		"job": {"run", "--job", "flooded", "--ranks", "4", "--nodes", "2", "--dir", w.path("flooded"), "--runtime-dir", w.path("flooded-rt"), "--quiet", "--",
			"lockstep", "train", "--dp", "2", "--tp", "1", "--pp", "2", "--dir", w.path("flooded-train"), "--steps", "40", "--pace", "50ms"}, // long enough to be found on a busy machine
		"preflight": {"preflight", "--ranks", "3", "--json", w.path("preflight.json")},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 4*bound)
		cmd, log := exec.CommandContext(ctx, "lockstep", args...), bytes.Buffer{}
		cmd.Stdout, cmd.Stderr = &log, &log
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		stop := scan(t, cmd.Process.Pid)
		err := cmd.Wait()
		cancel()
		ports, out := stop(), log.Bytes()
		var exit *exec.ExitError
		if name == "preflight" && errors.As(err, &exit) && exit.ExitCode() == 3 && bytes.Contains(out, []byte("latency")) && !bytes.Contains(out, []byte("rank that went away")) {
			err = nil // all ranks met and were measured; whether they are fast meanwhile is another matter
		}
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, out[max(0, len(out)-1500):])
		}
		if name == "job" && ports == 0 {
			t.Error("no port of the job's was found")
		}
		t.Logf("%s: %d ports were flooded", name, ports)
	}
	if n := refusedBy(t, w.path("flooded-rt")); n == 0 {
		t.Error("the flooded ranks' recorders tell of no refused connection")
	}
}

// refusedBy is how many connections the ranks say to have refused whose recorders are under dir.
func refusedBy(t *testing.T, dir string) (n uint64) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, record.Suffix) {
			return err
		}
		r, err := record.Open(path)
		if err != nil {
			return err
		}
		defer r.Close()
		for _, k := range r.Header().Refused {
			n += k
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// hostileRecorders has another user write recorder files where agents look.
func hostileRecorders(t *testing.T, w *town) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	var list []string
	for _, pattern := range []string{"*.rec", "*/*.rec"} { // of a user's own directory
		found, err := filepath.Glob(w.path("rt", "node0", pattern))
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, found...)
	}
	if len(list) == 0 {
		t.Fatal("the job has no recorders")
	}
	for _, path := range []string{filepath.Join(filepath.Dir(list[0]), "forged.rec"), list[0]} {
		if out, err := asNobody("sh", "-c", "echo x >"+path).CombinedOutput(); err == nil {
			t.Errorf("another user writes %s: %s", path, out)
		}
	}
	before := metric(t, w.agents[0], names.RecordersRefused, recorder.RefusedFile.String())
	// Files of another user that are there all the same (root's mistake) speak for nobody's job.
	for _, from := range list {
		if b, err := os.ReadFile(from); err == nil && strings.HasSuffix(from, ".rec") {
			to := strings.TrimSuffix(from, ".rec") + "x.rec"
			if err := errors.Join(os.WriteFile(to, b, 0o600), os.Chown(to, 65534, 65534)); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(to)
		}
	}
	grows(t, w.agents[0], names.RecordersRefused, before, recorder.RefusedFile.String())
}
