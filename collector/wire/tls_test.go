package wire_test

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
)

// handshake runs both ends' handshakes over a TCP connection.
func handshake(t *testing.T, client, server credentials.TransportCredentials, authority string) (clientErr, serverErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	served := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			served <- err
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		conn, _, err := server.ServerHandshake(c)
		if err == nil {
			_, err = conn.Write([]byte{1})
			_, _ = io.Copy(io.Discard, conn) // until the client has seen it
		}
		served <- err
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	conn, _, err := client.ClientHandshake(context.Background(), authority, c)
	if err == nil {
		_, err = conn.Read(make([]byte, 1)) // with TLS 1.3, the server's refusal comes here
	}
	c.Close()
	return err, <-served
}

func must(t *testing.T, w wire.TLS) credentials.TransportCredentials {
	t.Helper()
	c, err := w.Credentials()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestMutualTLS(t *testing.T) {
	ca, other := wiretest.NewAuthority(t), wiretest.NewAuthority(t)
	agent, master, stranger := ca.Agent("gpu-01"), ca.Master("llm"), other.Agent("gpu-01")
	ok := func(what string, c, s error) {
		t.Helper()
		if c != nil || s != nil {
			t.Errorf("%s: agent %v, master %v", what, c, s)
		}
	}
	refused := func(what string, c, s error) {
		t.Helper()
		if c == nil {
			t.Errorf("%s: agent %v, master %v", what, c, s)
		}
	}
	client, server := must(t, agent), must(t, master)
	c, s := handshake(t, client, server, "127.0.0.1:1")
	ok("both by one authority", c, s)
	c, s = handshake(t, client, server, "elsewhere.example:1")
	refused("a master with another name", c, s)
	agent.ServerName = "master.example"
	c, s = handshake(t, must(t, agent), server, "elsewhere.example:1")
	ok("a name of its own", c, s)
	c, s = handshake(t, must(t, stranger), server, "127.0.0.1:1")
	refused("an agent of another authority", c, s)
	c, s = handshake(t, client, must(t, other.Master("llm")), "127.0.0.1:1")
	refused("a master of another authority", c, s)

	// The authority is replaced under the running ends, and their certificates with it.
	ca.Renew()
	c, s = handshake(t, client, server, "127.0.0.1:1")
	refused("certificates of the old authority", c, s)
	ca.Agent("gpu-01")
	ca.Master("llm")
	c, s = handshake(t, client.Clone(), server, "127.0.0.1:1")
	ok("rotated certificates", c, s)
}

func TestCredentialErrors(t *testing.T) {
	good := wiretest.NewAuthority(t).Agent("gpu-01")
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("no PEM"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, f := range map[string]func(w *wire.TLS){
		"all needed":       func(w *wire.TLS) { w.CAFile = "" },
		"load certificate": func(w *wire.TLS) { w.CertFile = bad },
		"read CA":          func(w *wire.TLS) { w.CAFile = bad + "x" },
		"no PEM":           func(w *wire.TLS) { w.CAFile = bad },
	} {
		w := good
		f(&w)
		if _, err := w.Credentials(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if c, err := (*wire.TLS)(nil).Credentials(); err != nil || c.Info().SecurityProtocol != "insecure" {
		t.Errorf("no TLS: %v, %v", c, err)
	}
}

// An authority may sign for several trust domains: one has no say in another.
func TestAnotherTrustDomain(t *testing.T) {
	dir := t.TempDir()
	ca, err := pki.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(name string, id wire.Identity) credentials.TransportCredentials {
		files, err := ca.Issue(name, id, []string{"127.0.0.1"}, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return must(t, files)
	}
	ours := issue("a", wire.Identity{Domain: "ours", Role: wire.RoleAgent, Node: "n"})
	theirs := issue("b", wire.Identity{Domain: "theirs", Role: wire.RoleMaster, Jobs: []string{"j"}})
	if c, _ := handshake(t, ours, theirs, "127.0.0.1:1"); c == nil || !strings.Contains(c.Error(), "trust domain") {
		t.Errorf("agent: %v", c)
	}
}
