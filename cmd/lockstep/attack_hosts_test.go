package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

const hostsJob = "hosts"

// hostsOfAJob plays who reaches the coordinator of a job on several machines: strangers, hosts of other jobs,
// the same node twice, garbage, and a crowd. The job's ranks go on, another host gets in amidst it, and each
// refusal is counted.
func hostsOfAJob(t *testing.T, w *town) {
	addrs := freeAddrs(t, 2)
	meet, page := addrs[0], addrs[1]
	theirs, err := pki.Init(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	host := func(name string, flags []string, more ...string) *part {
		args := append([]string{"run", "--job", hostsJob, "-n", "2", "--hosts", "2", "--coordinator", meet, "--node", name,
			"--dir", w.path(name), "--runtime-dir", w.path("hosts-rt"), "--grace", "1s", "--control", "--quiet"}, flags...)
		args = append(append(args, more...), "--", "sleep", "3600")
		return w.run(t, name, args...)
	}
	agent := func(node string) wire.TLS {
		return files(t, w.ca, "host-"+node, wire.Identity{Role: wire.RoleAgent, Node: node, Jobs: []string{hostsJob}})
	}
	tls := func(f wire.TLS) []string {
		return []string{"--tls.cert", f.CertFile, "--tls.key", f.KeyFile, "--tls.ca", f.CAFile}
	}
	head := host("h0", w.flags(t, w.ca, "host-h0", wire.Identity{Role: wire.RoleMaster, Jobs: []string{hostsJob}}, "127.0.0.1"), "--coordinate", "yes", "--web.listen-address", page)
	first := host("h1", tls(agent("h1")), "--coordinate", "no")
	t.Cleanup(func() { head.end(t); first.end(t) })
	control := process.NewClient(w.path("h0", "control.sock"))
	eventually(t, "running", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), bound)
		defer cancel()
		s, err := control.Status(ctx)
		if err == nil && s.State != "running" {
			err = errors.New(s.State)
		}
		return err
	})
	refused := func(why process.RefusalReason) float64 {
		return metric(t, page, names.CoordinatorRefused, string(why))
	}
	counted := func(what string, before, more float64, now func() float64) {
		eventually(t, what+" counted", func() error {
			if n := now(); n < before+more {
				return fmt.Errorf("%v, before %v", n, before)
			}
			return nil
		})
	}

	strangers := refused(process.RefusedHandshake)
	for range 3 {
		c, err := net.Dial("tcp", meet)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("\x16\x03garbage, and no end of it: \x00\x00\x00\x00\x00\x00\x00\x00"))
		_, _ = c.Read(make([]byte, 1)) // until it is hung up on
		c.Close()
	}
	other := files(t, theirs, "x", wire.Identity{Role: wire.RoleAgent, Node: "h1"})
	other.CAFile = agent("h1").CAFile // they know whom to expect
	_ = say(t, meet, other, report("h1"))
	counted("strangers", strangers, 4, func() float64 { return refused(process.RefusedHandshake) })

	for _, x := range []struct {
		what string
		why  process.RefusalReason
		with wire.TLS
		says any
	}{
		{"a certificate of another node", process.RefusedCertificate, agent("h9"), report("h1")},
		{"a certificate of another tenant's job", process.RefusedCertificate, files(t, w.ca, "host-theirs", wire.Identity{Role: wire.RoleAgent, Node: "h1", Jobs: []string{"theirs"}}), report("h1")},
		{"a stolen certificate of a host that is heard", process.RefusedName, agent("h1"), report("h1")},
		{"a host of another job", process.RefusedJob, agent("h9"), but(report("h9"), func(r *process.Report) { r.Job = "other" })},
		{"a host that was told of more ranks", process.RefusedJob, agent("h9"), but(report("h9"), func(r *process.Report) { r.Local = 7 })},
		{"another version", process.RefusedMessage, agent("h9"), but(report("h9"), func(r *process.Report) { r.Protocol = 99 })},
		{"an environment that reaches ranks", process.RefusedMessage, agent("h9"), but(report("h9"), func(r *process.Report) { r.Meet = map[string]string{"LD_PRELOAD": "/tmp/x"} })},
		{"a message without end", process.RefusedMessage, agent("h9"), []byte{0xff, 0xff, 0xff, 0xff}},
		{"no message", process.RefusedMessage, agent("h9"), []byte("\x00\x00\x00\x03{]}")},
	} {
		before := refused(x.why)
		if order := say(t, meet, x.with, x.says); order != nil && order.Kind != "refuse" {
			t.Errorf("%s: the coordinator orders %+v", x.what, order)
		}
		counted(x.what, before, 1, func() float64 { return refused(x.why) })
	}

	crowdOfHosts(t, meet, page, func() *part { return host("h2", tls(agent("h2")), "--coordinate", "no") })

	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	s, err := control.Status(ctx)
	if err != nil || s.Attempt != 0 || s.State != "running" || len(s.Out) != 0 {
		t.Errorf("the job: %+v, %v", s, err)
	}
	if n := metric(t, page, names.SupervisorLeases); n != 0 {
		t.Errorf("%v leases ended", n)
	}
	if mib := resident(head.Process.Pid) >> 20; mib > 512 {
		t.Errorf("the coordinator uses %d MiB", mib)
	}
	if err := w.get(page+"/-/ready", "", nil); err != nil {
		t.Error(err)
	}
}

// crowdOfHosts has a crowd from another address hold all the places that a coordinator has, and more, and an honest
// host come amidst it.
func crowdOfHosts(t *testing.T, meet, page string, honest func() *part) {
	crowded := metric(t, page, names.ConnsCrowded, names.ListenerCoordinator)
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 66)}, Timeout: bound}
	stop := make(chan struct{})
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		var held []net.Conn
		for {
			select {
			case <-stop:
				for _, c := range held {
					c.Close()
				}
				return
			default:
			}
			if c, err := from.Dial("tcp", meet); err == nil {
				held = append(held, c)
			}
			time.Sleep(time.Millisecond) // so that there are ports for it, however long the rest takes
			if len(held) > 600 {
				held[0].Close()
				held = held[1:]
			}
		}
	}()
	grows(t, page, names.ConnsCrowded, crowded, names.ListenerCoordinator)
	joined := metric(t, page, names.CoordinatorJoins)
	spare := honest()
	grows(t, page, names.CoordinatorJoins, joined)
	close(stop)
	<-flooded
	spare.end(t)
}

// report is what an honest supervisor of a node says first; the state directory is not that of any other.
func report(node string) process.Report {
	return process.Report{Protocol: 1, Seq: 1, Job: hostsJob, Node: node, Holder: "abad1dea", Boot: "abad1dea", Local: 1}
}

func but(r process.Report, f func(*process.Report)) process.Report {
	f(&r)
	return r
}

// say says something to a coordinator, and returns its order, nil for none.
func say(t *testing.T, addr string, f wire.TLS, what any) *process.Order {
	t.Helper()
	creds, err := f.MasterOf(hostsJob)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	_ = raw.SetDeadline(time.Now().Add(2 * bound))
	ctx, cancel := context.WithTimeout(context.Background(), 2*bound)
	defer cancel()
	conn, _, err := creds.ClientHandshake(ctx, "127.0.0.1", raw)
	if err != nil {
		return nil
	}
	b, isRaw := what.([]byte)
	if !isRaw {
		if b, err = json.Marshal(what); err != nil {
			t.Fatal(err)
		}
		b = append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
	}
	if _, err := conn.Write(b); err != nil {
		return nil
	}
	var head [4]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return nil
	}
	body := make([]byte, min(binary.BigEndian.Uint32(head[:]), 1<<20))
	if _, err := io.ReadFull(conn, body); err != nil {
		return nil
	}
	var o process.Order
	if err := json.Unmarshal(body, &o); err != nil {
		t.Fatal(err)
	}
	return &o
}
