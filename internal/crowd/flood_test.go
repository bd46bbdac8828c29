package crowd_test

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/internal/accept/acceptest"
	"github.com/lockstep-ccl/lockstep/internal/crowd"
)

// floodEnv has this program flood an address, or only be busy.
const floodEnv = "CROWD_TEST_FLOOD"

func TestMain(m *testing.M) {
	if to := os.Getenv(floodEnv); to != "" {
		floodMain(to)
	}
	goleak.VerifyTestMain(m)
}

// attackers returns the kinds of unauthenticated clients of a listener of pages or gRPC.
func attackers() []acceptest.Behaviour {
	hello := clientHello()
	return []acceptest.Behaviour{
		acceptest.Silent,
		acceptest.Drips(hello),
		acceptest.Says([]byte("GET / HTTP/1.1\r\nHost: x\r\n")),
		acceptest.Says([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")),
		acceptest.Says(hello), // and nothing after the server's
		acceptest.Says([]byte("\x00\xff garbage, in any protocol\r\n\r\n")),
	}
}

// clientHello returns a TLS client's first message.
func clientHello() []byte {
	here, there := net.Pipe()
	defer here.Close()
	go func() {
		defer there.Close()
		_ = tls.Client(there, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}).Handshake() // nobody answers
	}()
	head := make([]byte, 5)
	io.ReadFull(here, head)
	body := make([]byte, int(head[3])<<8|int(head[4]))
	io.ReadFull(here, body)
	return append(head, body...)
}

func certificate(t testing.TB) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"x"}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// pages serves as exporters/web does, agents as a master does.
func pages(t testing.TB, l net.Listener) (ask func(net.Conn) error) {
	s := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "here") })}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return func(c net.Conn) error {
		if _, err := c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")); err != nil {
			return err
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			_, err = io.ReadAll(resp.Body)
			resp.Body.Close()
		}
		return err
	}
}

func agents(t testing.TB, l net.Listener) (ask func(net.Conn) error) {
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{certificate(t)}})), grpc.ConnectionTimeout(5*time.Second))
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return func(c net.Conn) error {
		conn := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		if _, err := conn.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")); err != nil {
			return err
		}
		_, err := io.ReadFull(conn, make([]byte, 9)) // of its settings
		return err
	}
}

// BenchmarkFirstByte is what a flood costs a client of another address that comes anew, as curl, a
// browser or Prometheus does, without Dial: from its SYN to the first byte of an answer. Four processes flood, from
// four addresses, so many connections at a time (hands); two more use what they can of a core each.
func BenchmarkFirstByte(b *testing.B) {
	for _, l := range []struct {
		name  string
		serve func(testing.TB, net.Listener) func(net.Conn) error
		most  int
		short bool
	}{{"pages", pages, 512, true}, {"agents", agents, 4096 + 64, false}} {
		for _, f := range []struct {
			name           string
			n, busy, hands int
			from           string
			members        bool // they Dial
		}{
			{name: "quiet", from: "127.0.0.77"},
			{name: "busy", busy: 2, from: "127.0.0.77"},
			{name: "8000,busy", n: 8000, busy: 2, hands: 16, from: "127.0.0.77"},
			{name: "8000,busy,hands=1000", n: 8000, busy: 2, hands: 1000, from: "127.0.0.77"},
			{name: "8000,busy,hands=1000,same", n: 8000, busy: 2, hands: 1000, from: "127.0.0.1"},
			{name: "8000,busy,hands=1000,same,Dial", n: 8000, busy: 2, hands: 1000, from: "127.0.0.1", members: true},
		} {
			b.Run(l.name+"/"+f.name, func(b *testing.B) {
				ln, err := accept.Listen("127.0.0.1:0")
				if err != nil {
					b.Fatal(err)
				}
				limited, err := crowd.Limit(ln, l.most, l.short)
				if err != nil {
					b.Fatal(err)
				}
				defer limited.Close()
				ask := l.serve(b, limited)
				defer floodFrom(b, ln.Addr().String(), f.n, f.busy, f.hands)()
				if f.n > 0 {
					time.Sleep(2 * time.Second)
				}
				var all []time.Duration
				failed := 0
				d := net.Dialer{Timeout: 20 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(f.from)}}
				connect := func(to string) (net.Conn, error) { return d.Dial("tcp", to) }
				if f.members {
					connect = func(to string) (net.Conn, error) { return accept.Dial(b.Context(), &d, to) }
				}
				b.ResetTimer()
				for range b.N {
					began := time.Now()
					for {
						c, err := connect(ln.Addr().String())
						if err == nil {
							c.SetDeadline(time.Now().Add(20 * time.Second))
							err = ask(c)
							c.Close()
						}
						if err == nil {
							break
						}
						failed++
						if time.Since(began) > time.Minute {
							b.Fatal(err)
						}
					}
					all = append(all, time.Since(began))
					time.Sleep(20 * time.Millisecond)
				}
				slices.Sort(all)
				b.ReportMetric(float64(all[len(all)/2].Microseconds())/1e3, "ms/median")
				b.ReportMetric(float64(all[len(all)-1].Microseconds())/1e3, "ms/worst")
				b.ReportMetric(float64(failed), "failed")
				b.ReportMetric(float64(limited.HungUp())/b.Elapsed().Seconds(), "hungup/s")
			})
		}
	}
}

// floodFrom has four processes flood an address with n connections, and others be busy.
func floodFrom(b *testing.B, addr string, n, busy, hands int) (stop func()) {
	b.Helper()
	const processes = 4
	var all []*exec.Cmd
	begin := func(env ...string) {
		c := exec.Command(os.Args[0], "-test.run=^$")
		c.Env = append(os.Environ(), env...)
		out, err := c.StdoutPipe()
		if err == nil {
			err = c.Start()
		}
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, c)
		out.Read(make([]byte, 1)) // it has begun
	}
	if n > 0 {
		for range processes {
			begin(floodEnv+"="+addr, fmt.Sprint(floodEnv, "_N=", n/processes), fmt.Sprint(floodEnv, "_HANDS=", hands/processes))
		}
	}
	for range busy {
		begin(floodEnv+"=busy", "GOMAXPROCS=1")
	}
	return func() {
		for _, c := range all {
			c.Process.Kill()
			c.Wait()
		}
	}
}

func floodMain(to string) {
	if to == "busy" {
		fmt.Print(".")
		for { //nolint:staticcheck // that is what it is for
		}
	}
	n, _ := strconv.Atoi(os.Getenv(floodEnv + "_N"))
	hands, _ := strconv.Atoi(os.Getenv(floodEnv + "_HANDS"))
	acceptest.BeginBy(hands, to, n, attackers()...)
	fmt.Print(".")
	select {}
}
