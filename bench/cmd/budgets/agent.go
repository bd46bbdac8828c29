package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	nodeRanks      = 8
	nodeRate       = 50_000 // collectives a second of all ranks of the node
	agentWarmUp    = 3 * time.Second
	agentMeasured  = 10 * time.Second
	agentStartup   = 30 * time.Second
	benchJob       = "budgets"
	collectiveTime = 8 * time.Microsecond
)

// agentLoad runs the product's own agent as it would run in production, with a
// master, a trace backend and a scraper, on a node whose ranks finish 50,000
// collectives a second, and asks the kernel what that process used.
//
// The ranks record a collective at once, as ccl does, or in five parts: enqueue,
// start, two phases and end, as a program would that learns of them one by one.
func agentLoad(name string, perCollective int) ([]row, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp(sharedMemory(), "budgets-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	program, err := lockstep(ctx, dir)
	if err != nil {
		return nil, err
	}
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/x-protobuf") // an empty response: everything accepted
	}))
	defer backend.Close()
	recorders := filepath.Join(dir, "run")
	masterAddr, masterWeb, agentWeb := freeAddr(), freeAddr(), freeAddr()
	_, stopMaster, err := start(ctx, nil, program, "master", "--job", benchJob, "--listen", masterAddr, "--web.listen-address", masterWeb)
	if err != nil {
		return nil, err
	}
	defer stopMaster()
	pid, stopAgent, err := start(ctx, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + backend.URL},
		program, "agent", "--node", "local", "--runtime-dir", recorders, "--master", masterAddr, "--web.listen-address", agentWeb)
	if err != nil {
		return nil, err
	}
	defer stopAgent()
	for deadline := time.Now().Add(agentStartup); ; time.Sleep(50 * time.Millisecond) {
		if _, _, err = scrape(ctx, agentWeb); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("the agent did not come up: %w", err)
		}
	}

	proc, err := procfs.NewProc(pid)
	if err != nil {
		return nil, err
	}
	ranks, err := newRanks(recorders)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, r := range ranks {
			r.w.Close()
		}
	}()
	appended := perCollective * produce(ctx, ranks, perCollective, agentWarmUp, agentWeb)
	before, err := proc.Stat()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	n := produce(ctx, ranks, perCollective, agentMeasured, agentWeb)
	elapsed := time.Since(began)
	appended += perCollective * n
	after, err := proc.Stat()
	if err != nil {
		return nil, err
	}
	status, err := proc.NewStatus()
	if err != nil {
		return nil, err
	}
	if rate := float64(n) / elapsed.Seconds(); rate < 0.98*nodeRate {
		return nil, fmt.Errorf("this machine is too busy: the ranks made %.0f collectives a second instead of %d", rate, nodeRate)
	}

	var read, lost float64
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if read, lost, err = scrape(ctx, agentWeb); err != nil {
			return nil, err
		}
		if read+lost >= float64(appended) {
			break
		}
	}
	if lost > float64(appended)/100 {
		return nil, fmt.Errorf("the agent read only %.0f of %d records: what it used says nothing", read, appended)
	}
	unaccounted := float64(appended) - read - lost
	return []row{
		{name + "_cpu", (after.CPUTime() - before.CPUTime()) / elapsed.Seconds(), "cores", 0.25},
		{name + "_rss_peak", float64(status.VmHWM) / (1 << 20), "MiB", 64},
		{name + "_unaccounted_records", max(unaccounted, -unaccounted), "records", 0},
	}, nil
}

// start runs a program until stop is called.
func start(ctx context.Context, env []string, name string, args ...string) (pid int, stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		cancel()
		return 0, nil, err
	}
	return cmd.Process.Pid, func() {
		cancel()
		_ = cmd.Wait() // says that it was asked to stop
	}, nil
}

// freeAddr returns a loopback address that nobody listens on now.
func freeAddr() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "127.0.0.1:0" // the program that is given it will say why
	}
	defer l.Close()
	return l.Addr().String()
}

// scrape fetches the agent's metrics and returns the records that it has read
// and that it knows to be lost.
func scrape(ctx context.Context, addr string) (read, lost float64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		return 0, 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, 0, fmt.Errorf("%s: %s", req.URL, resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, _, _ := strings.Cut(lines.Text(), "{")
		value, err := strconv.ParseFloat(lines.Text()[strings.LastIndexByte(lines.Text(), ' ')+1:], 64)
		switch {
		case name == names.RecorderRecords.Name && err == nil:
			read += value
		case name == names.RecorderLost.Name && err == nil:
			lost += value
		}
	}
	return read, lost, lines.Err()
}

// benchRank is one rank of the node: a recorder with four communicators.
type benchRank struct {
	w     *record.Writer
	comms []*record.Comm
	seq   []uint64
	turn  int
}

func newRanks(dir string) ([]*benchRank, error) {
	var ranks []*benchRank
	for i := range nodeRanks {
		w, err := record.Create(record.Options{Dir: dir, Identity: record.Identity{
			Job: benchJob, Node: "local", Rank: int32(i), WorldSize: nodeRanks, LocalRank: int32(i),
		}})
		if err != nil {
			return nil, err
		}
		r := &benchRank{w: w}
		ranks = append(ranks, r)
		for id, name := range []string{"world", "dp", "tp", "pp"} {
			c, ok := w.AddComm(record.CommEntry{
				ID: uint64(id + 1), Name: name, Rank: int32(i), Size: nodeRanks, State: record.CommJoined,
			})
			if !ok {
				return nil, fmt.Errorf("no room for communicator %s", name)
			}
			r.comms, r.seq = append(r.comms, c), append(r.seq, 0)
		}
	}
	return ranks, nil
}

// produce makes the node's ranks finish collectives at the rate of the budget
// for a while, scrapes the agent once a second, and returns how many.
func produce(ctx context.Context, ranks []*benchRank, perCollective int, during time.Duration, agentWeb string) (collectives int) {
	began := time.Now()
	done, scraped := 0, 0
	for {
		elapsed := time.Since(began)
		for due := int(min(elapsed, during).Seconds() * nodeRate); done < due; done++ {
			ranks[done%len(ranks)].collective(perCollective)
		}
		if elapsed >= during || ctx.Err() != nil {
			return done
		}
		if s := int(elapsed.Seconds()); s > scraped {
			scraped = s
			go func() { _, _, _ = scrape(ctx, agentWeb) }() // its load counts, its answer does not
		}
		time.Sleep(time.Millisecond)
	}
}

// collective records one AllReduce that has just ended.
func (r *benchRank) collective(records int) {
	i := r.turn % len(r.comms)
	r.turn++
	r.seq[i]++
	c, seq, bytes, now := r.comms[i], r.seq[i], uint64(1<<20), record.Now()
	wait, transfer := int64(collectiveTime/4), int64(collectiveTime*3/4)
	begin, mid := now-wait-transfer, now-transfer

	c.Enqueued(seq, begin, record.AllReduce, bytes)
	c.Started(seq, begin)
	rec := record.Record{Mono: begin, Comm: c.Index(), Seq: seq, Coll: record.AllReduce, Root: -1, Peer: -1}
	rec.DType, rec.Op, rec.Bytes, rec.Algo, rec.Proto, rec.Chan = record.BFloat16, record.Sum, bytes, record.AlgoRing, record.ProtoSimple, 1
	if records == 1 {
		rec.Kind, rec.Mono, rec.Dur, rec.Wait = record.KindWhole, now, wait+transfer, wait
		r.w.Append(&rec)
	} else {
		rec.Kind = record.KindEnqueue
		r.w.Append(&rec)
		rec.Kind, rec.Stamp = record.KindStart, begin
		r.w.Append(&rec)
		rec.Kind, rec.Code, rec.Index, rec.Stamp, rec.Dur = record.KindPhase, uint8(record.PhaseWait), 0, mid, wait
		r.w.Append(&rec)
		rec.Code, rec.Index, rec.Stamp, rec.Dur = uint8(record.PhaseTransfer), 1, now, transfer
		r.w.Append(&rec)
		rec.Kind, rec.Code, rec.Mono, rec.Stamp = record.KindEnd, uint8(record.ResultOK), now, now
		r.w.Append(&rec)
	}
	c.AddPhases(1000, wait, transfer, bytes)
	c.Finished(seq, now)
}
