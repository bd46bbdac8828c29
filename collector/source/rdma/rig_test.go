package rdma

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine is a directory in place of /sys.
type machine struct {
	t   testing.TB
	dir string
}

func newMachine(t testing.TB) *machine { return &machine{t, t.TempDir()} }

func (m *machine) write(file, text string) {
	m.t.Helper()
	file = filepath.Join(m.dir, file)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text+"\n"), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) link(name, target string) {
	m.t.Helper()
	name = filepath.Join(m.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Symlink(target, name); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) remove(file string) {
	m.t.Helper()
	if err := os.RemoveAll(filepath.Join(m.dir, file)); err != nil {
		m.t.Fatal(err)
	}
}

// netdev makes or changes an interface.
func (m *machine) netdev(name string, index int, up bool, downs int) {
	m.t.Helper()
	m.write("class/net/"+name+"/ifindex", fmt.Sprint(index))
	m.write("class/net/"+name+"/carrier", map[bool]string{true: "1", false: "0"}[up])
	m.write("class/net/"+name+"/carrier_down_count", fmt.Sprint(downs))
}

// state changes a port.
func (m *machine) state(device, state, phys string) {
	m.t.Helper()
	m.write("class/infiniband/"+device+"/ports/1/state", state)
	m.write("class/infiniband/"+device+"/ports/1/phys_state", phys)
}

// roce makes a ConnectX on a bus, with an interface.
func (m *machine) roce(device, bus, netdev string, index int) {
	m.t.Helper()
	dir := "class/infiniband/" + device + "/"
	m.write("devices/pci0000:15/"+bus+"/vendor", "0x15b3")
	m.write(dir+"hca_type", "MT4129")
	m.write(dir+"fw_ver", "28.39.1002")
	m.link(dir+"device", "../../../devices/pci0000:15/"+bus)
	m.write(dir+"ports/1/link_layer", "Ethernet")
	m.write(dir+"ports/1/rate", "400 Gb/sec (4X NDR)")
	m.state(device, "4: ACTIVE", "5: LinkUp")
	m.write(dir+"ports/1/gid_attrs/ndevs/0", netdev)
	m.netdev(netdev, index, true, 2)
	for name, value := range map[string]string{
		"out_of_sequence": "7", "packet_seq_err": "3", "local_ack_timeout_err": "1", "rp_cnp_handled": "11", "np_cnp_sent": "12",
		"rx_icrc_encapsulated": "0", "lifespan": "10", "req_cqe_flush_error": "999", "rx_write_requests": "5",
	} {
		m.write(dir+"ports/1/hw_counters/"+name, value)
	}
	for name, value := range map[string]string{
		"port_rcv_data": "1000", "port_xmit_data": "2000", "port_rcv_packets": "10", "port_xmit_packets": "20", "port_xmit_wait": "30",
		"symbol_error": "0", "link_downed": "1", "VL15_dropped": "N/A (no PMA)",
	} {
		m.write(dir+"ports/1/counters/"+name, value)
	}
}

// rxe makes a soft-RoCE device over a virtual interface.
func (m *machine) rxe(device, netdev string, index int) {
	m.t.Helper()
	dir := "class/infiniband/" + device + "/"
	m.write(dir+"ports/1/link_layer", "Ethernet")
	m.write(dir+"ports/1/rate", "2.5 Gb/sec (1X SDR)")
	m.state(device, "4: ACTIVE", "5: LinkUp")
	m.write(dir+"ports/1/gid_attrs/ndevs/0", netdev)
	m.netdev(netdev, index, true, 0)
	for name, value := range map[string]string{
		"sent_pkts": "100", "rcvd_pkts": "90", "duplicate_request": "1", "out_of_seq_request": "2", "rcvd_rnr_err": "3",
		"send_rnr_err": "0", "rcvd_seq_err": "4", "completer_retry_err": "5", "retry_exceeded_err": "6", "link_downed": "0", "ack_deferred": "88",
	} {
		m.write(dir+"ports/1/hw_counters/"+name, value)
	}
}

// air is what announces links in a test.
type air struct {
	opened  error
	links   chan seenLink
	errs    chan error
	closed  chan struct{}
	closing sync.Once
}

func (a *air) open() error { return a.opened }
func (a *air) receive() ([]seenLink, error) {
	select {
	case l := <-a.links:
		return []seenLink{l}, nil
	case err := <-a.errs:
		return nil, err
	case <-a.closed:
		return nil, os.ErrClosed
	}
}
func (a *air) close() { a.closing.Do(func() { close(a.closed) }) }

// rig is a source, and the agent's clock.
type rig struct {
	*Source
	t   testing.TB
	m   *machine
	air *air
	log *logs
	v   source.View
}

type logs struct {
	mu    sync.Mutex
	lines []string
}

func (l *logs) Enabled(context.Context, slog.Level) bool { return true }
func (l *logs) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logs) WithGroup(string) slog.Handler            { return l }
func (l *logs) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := r.Message
	r.Attrs(func(a slog.Attr) bool { line += " " + a.String(); return true })
	l.lines = append(l.lines, line)
	return nil
}

func (l *logs) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(strings.Join(l.lines, "\n"), text)
}

func start(t testing.TB, m *machine, sys fs.FS) *rig {
	r := &rig{t: t, m: m, log: &logs{}, air: &air{links: make(chan seenLink), errs: make(chan error), closed: make(chan struct{})}}
	if sys == nil {
		sys = os.DirFS(m.dir)
	}
	r.Source = newSource(Options{Sys: sys, Period: 5 * time.Second, Bound: 10 * time.Second, Log: slog.New(r.log)}, r.air)
	r.v.Now = 1e9
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// pass is one of the agent's, d after the last.
func (r *rig) pass(d time.Duration) error {
	r.v.Now += d.Nanoseconds()
	return r.Update(&r.v)
}

// probe starts a probe and waits for it.
func (r *rig) probe() error {
	r.t.Helper()
	r.v.Now += r.o.Period.Nanoseconds()
	_ = r.Update(&r.v)
	return r.landed()
}

// landed waits for the probe that runs.
func (r *rig) landed() error {
	r.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if err := r.Update(&r.v); !r.probes.Busy() || r.node.UnresponsiveAt != 0 {
			return err
		}
	}
	r.t.Fatal("no probe came back")
	return nil
}

// hear has a change announced, and waits until the source has taken it in.
func (r *rig) hear(l seenLink) {
	r.t.Helper()
	r.air.links <- l
	r.air.links <- seenLink{name: "lo"} // received after l was handed on
	_ = r.pass(100 * time.Millisecond)
}

func (r *rig) port(device string) collector.NICPort {
	r.t.Helper()
	if r.v.NICs != nil {
		for _, p := range r.v.NICs.Ports {
			if p.Device == device {
				return p
			}
		}
	}
	r.t.Fatalf("no port of %s in %+v", device, r.v.NICs)
	return collector.NICPort{}
}

func f(v float64) *float64 { return &v }

func count(n uint64) *uint64 { return &n }

// bad is a file system with files that cannot be read, or not yet.
type bad struct {
	fs.FS
	mu     sync.Mutex
	fails  map[string]error
	blocks map[string]chan struct{}
}

func (b *bad) Open(name string) (fs.File, error) {
	b.mu.Lock()
	wait, err := b.blocks[name], b.fails[name]
	b.mu.Unlock()
	if wait != nil {
		<-wait
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return b.FS.Open(name)
}

func (b *bad) ReadDir(name string) ([]fs.DirEntry, error) {
	b.mu.Lock()
	err := b.fails[name]
	b.mu.Unlock()
	if err != nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: err}
	}
	return fs.ReadDir(b.FS, name)
}

func (b *bad) ReadLink(name string) (string, error) { return fs.ReadLink(b.FS, name) }
func (b *bad) Lstat(name string) (fs.FileInfo, error) {
	return fs.Lstat(b.FS, name)
}

// block makes reads of a file wait for release.
func (b *bad) block(name string) (release func()) {
	wait := make(chan struct{})
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.blocks == nil {
		b.blocks = map[string]chan struct{}{}
	}
	b.blocks[name] = wait
	return func() {
		b.mu.Lock()
		delete(b.blocks, name)
		b.mu.Unlock()
		close(wait)
	}
}
