package flags

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"time"
)

// Listen checks an address to listen on, of the flag of this name; "" is not to listen.
func Listen(flag, addr string) error {
	if addr == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("--%s %s: want HOST:PORT, or :PORT for all addresses", flag, addr)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("--%s %s: %q is no port (0 to 65535)", flag, addr, port)
	}
	return nil
}

// Dial checks an address to connect to, of the flag of this name; "" is none.
func Dial(flag, addr string) error {
	if addr == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return fmt.Errorf("--%s %s: want HOST:PORT", flag, addr)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("--%s %s: %q is no port (1 to 65535)", flag, addr, port)
	}
	return nil
}

// Dir checks a directory that may be yet to be made, of the flag of this name.
func Dir(flag, path string) error {
	if fi, err := os.Stat(path); err == nil && !fi.IsDir() {
		return fmt.Errorf("--%s %s: it is no directory", flag, path)
	}
	return nil
}

// Positive checks a duration.
func Positive(flag string, d time.Duration) error {
	if d <= 0 {
		return fmt.Errorf("--%s %v: want more than 0", flag, d)
	}
	return nil
}

// Check checks what can be checked before anything is opened.
func (f *Web) Check() error {
	if err := Listen("web.listen-address", f.ListenAddress); err != nil {
		return err
	}
	return Listen("web.pprof-address", f.Pprof)
}

// Check wants all of what mutual TLS takes, or nothing.
func (t *TLS) Check() error {
	if t.Wire() == nil || t.Cert != "" && t.Key != "" && t.CA != "" {
		return nil
	}
	return fmt.Errorf("--tls.cert %q, --tls.key %q, --tls.ca %q: mutual TLS takes all three (lockstep pki makes them)", t.Cert, t.Key, t.CA)
}
