package otlp_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/otlp"
)

// setenv gives the test an environment whose only OTEL_ variables are these,
// each with the prefix OTEL_EXPORTER_OTLP_ unless it has its own.
func setenv(t *testing.T, vars map[string]string) {
	t.Helper()
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "OTEL_") {
			t.Setenv(name, "")
		}
	}
	for name, value := range vars {
		if !strings.HasPrefix(name, "OTEL_") {
			name = "OTEL_EXPORTER_OTLP_" + name
		}
		t.Setenv(name, value)
	}
}

func TestConfigFromEnv(t *testing.T) {
	for _, tt := range []struct {
		name     string
		env      map[string]string
		endpoint string
		protocol otlp.Protocol
		tls      bool
		check    func(otlp.Config) bool
	}{
		{name: "nothing set"},
		{name: "base URL", env: map[string]string{"ENDPOINT": "http://tempo:4318"}, endpoint: "http://tempo:4318/v1/traces", protocol: otlp.HTTP},
		{name: "base URL with path", env: map[string]string{"ENDPOINT": "https://gw.test/otlp/"}, endpoint: "https://gw.test/otlp/v1/traces", protocol: otlp.HTTP, tls: true},
		{name: "traces URL as it is", env: map[string]string{"TRACES_ENDPOINT": "http://tempo:4318/in", "ENDPOINT": "http://no:1"}, endpoint: "http://tempo:4318/in", protocol: otlp.HTTP},
		{name: "traces URL without path", env: map[string]string{"TRACES_ENDPOINT": "http://tempo:4318"}, endpoint: "http://tempo:4318/", protocol: otlp.HTTP},
		{name: "gRPC URL", env: map[string]string{"ENDPOINT": "http://tempo:4317", "PROTOCOL": "grpc"}, endpoint: "tempo:4317", protocol: otlp.GRPC},
		{name: "port 4317 is gRPC", env: map[string]string{"ENDPOINT": "http://tempo:4317"}, endpoint: "tempo:4317", protocol: otlp.GRPC},
		{name: "port 4317 for traces", env: map[string]string{"TRACES_ENDPOINT": "https://tempo:4317", "ENDPOINT": "http://x:4318"}, endpoint: "tempo:4317", protocol: otlp.GRPC, tls: true},
		{name: "a target with port 4317", env: map[string]string{"ENDPOINT": "tempo:4317", "INSECURE": "true"}, endpoint: "tempo:4317", protocol: otlp.GRPC},
		{name: "HTTP on port 4317 when it is said", env: map[string]string{"ENDPOINT": "http://tempo:4317", "PROTOCOL": "http/protobuf"}, endpoint: "http://tempo:4317/v1/traces", protocol: otlp.HTTP},
		{name: "gRPC URL over TLS wins over INSECURE", env: map[string]string{"ENDPOINT": "https://tempo:4317", "PROTOCOL": "grpc", "INSECURE": "true"}, endpoint: "tempo:4317", protocol: otlp.GRPC, tls: true},
		{name: "gRPC target", env: map[string]string{"ENDPOINT": "tempo:4317", "TRACES_PROTOCOL": "grpc", "PROTOCOL": "http/protobuf"}, endpoint: "tempo:4317", protocol: otlp.GRPC, tls: true},
		{name: "gRPC target in plain text", env: map[string]string{"ENDPOINT": "tempo:4317", "PROTOCOL": "grpc", "TRACES_INSECURE": "TRUE"}, endpoint: "tempo:4317", protocol: otlp.GRPC},
		{name: "gRPC over a unix socket", env: map[string]string{"ENDPOINT": "unix:///run/otel.sock", "PROTOCOL": "grpc"}, endpoint: "unix:///run/otel.sock", protocol: otlp.GRPC},
		{name: "disabled", env: map[string]string{"ENDPOINT": "http://tempo:4318", "OTEL_SDK_DISABLED": "true"}},
		{name: "no exporter", env: map[string]string{"ENDPOINT": "http://tempo:4318", "OTEL_TRACES_EXPORTER": "none"}},
		{name: "always off", env: map[string]string{"ENDPOINT": "http://tempo:4318", "OTEL_TRACES_SAMPLER": "parentbased_always_off"}},
		{
			name: "settings", endpoint: "http://tempo:4318/v1/traces", protocol: otlp.HTTP,
			env: map[string]string{
				"ENDPOINT": "http://tempo:4318", "HEADERS": "authorization=Bearer%20s3cret, X-Scope=a=b", "TIMEOUT": "2500", "COMPRESSION": "gzip",
				"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25",
			},
			check: func(c otlp.Config) bool {
				return c.Headers["authorization"] == "Bearer s3cret" && c.Headers["x-scope"] == "a=b" && c.Timeout == 2500*time.Millisecond && c.Gzip && c.Ratio == 0.25
			},
		},
		{
			name: "defaults", endpoint: "http://tempo:4318/v1/traces", protocol: otlp.HTTP, env: map[string]string{"ENDPOINT": "http://tempo:4318"},
			check: func(c otlp.Config) bool {
				return c.Timeout == 10*time.Second && !c.Gzip && c.Ratio == otlp.DefaultRatio && c.Resource.SchemaURL() != ""
			},
		},
		{
			name: "always on", endpoint: "http://tempo:4318/v1/traces", protocol: otlp.HTTP,
			env:   map[string]string{"ENDPOINT": "http://tempo:4318", "OTEL_TRACES_SAMPLER": "always_on"},
			check: func(c otlp.Config) bool { return c.Ratio == 1 },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			setenv(t, tt.env)
			c, err := otlp.ConfigFromEnv("lockstep-agent", "1.2.3", "gpu-01")
			if err != nil {
				t.Fatal(err)
			}
			if c.Endpoint != tt.endpoint || c.Protocol != tt.protocol || (c.TLS != nil) != tt.tls || c.Enabled() != (tt.endpoint != "") {
				t.Errorf("got endpoint %q, protocol %q, TLS %v", c.Endpoint, c.Protocol, c.TLS != nil)
			}
			if tt.check != nil && !tt.check(c) {
				t.Errorf("got %+v", c)
			}
		})
	}
}

func TestConfigErrorsSayWhatToDo(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"ENDPOINT": "tempo:4318"}, "want a URL such as http://localhost:4318"},
		{map[string]string{"ENDPOINT": "ftp://tempo"}, "want a URL"},
		{map[string]string{"ENDPOINT": "ftp://u:s3cret@tempo/in?key=s3cret"}, `"ftp://tempo/in": want a URL`},
		{map[string]string{"ENDPOINT": "u:s3cret@tempo:4318?key=s3cret"}, `"tempo:4318": want a URL`},
		{map[string]string{"ENDPOINT": "http://x", "PROTOCOL": "http/json"}, "use grpc or http/protobuf"},
		{map[string]string{"ENDPOINT": "http://x", "COMPRESSION": "zstd"}, "use gzip or none"},
		{map[string]string{"ENDPOINT": "http://x", "TIMEOUT": "10s"}, "want milliseconds"},
		{map[string]string{"ENDPOINT": "http://x", "OTEL_TRACES_SAMPLER": "jaeger_remote"}, "use traceidratio, always_on or always_off"},
		{map[string]string{"ENDPOINT": "http://x", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "50%"}, "want a share from 0 to 1"},
		{map[string]string{"ENDPOINT": "http://x", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "NaN"}, "want a share from 0 to 1"},
		{map[string]string{"ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "console"}, "use otlp or none"},
		{map[string]string{"ENDPOINT": "https://x", "CERTIFICATE": empty}, "holds no PEM certificate"},
		{map[string]string{"ENDPOINT": "https://x", "CERTIFICATE": empty + ".not"}, "OTEL_EXPORTER_OTLP_CERTIFICATE"},
		{map[string]string{"ENDPOINT": "https://x", "CLIENT_KEY": empty}, "set both or neither"},
		{map[string]string{"ENDPOINT": "x:1", "PROTOCOL": "grpc", "INSECURE": "yes"}, "use true or false"},
		{map[string]string{"ENDPOINT": "http://x", "HEADERS": "s3cret"}, "want key=value pairs"},
		{map[string]string{"ENDPOINT": "http://x", "HEADERS": "a=s3cret%0d%0aX: y"}, `no header of the name "a"`},
		{map[string]string{"ENDPOINT": "http://x", "HEADERS": "my tenant=s3cret"}, `no header of the name "my tenant"`},
		{map[string]string{"ENDPOINT": "http://x", "PROTOCOL": "grpc", "HEADERS": "tenant!=s3cret"}, `grpc sends no header of the name "tenant!"`},
		{map[string]string{"ENDPOINT": "http://x", "PROTOCOL": "grpc", "HEADERS": "tenant=s3cret%C3%A9"}, `grpc sends no header of the name "tenant"`},
		{map[string]string{"ENDPOINT": "http://u:s3cret@x:4317"}, `"http://x:4317": gRPC takes no user and password`},
		{map[string]string{"ENDPOINT": "http://x", "OTEL_RESOURCE_ATTRIBUTES": "pod"}, "OTEL_RESOURCE_ATTRIBUTES"},
	} {
		setenv(t, tt.env)
		_, err := otlp.ConfigFromEnv("lockstep-agent", "1.2.3", "gpu-01")
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%v: error %v, want %q", tt.env, err, tt.want)
		}
	}
}

func selfSigned(t *testing.T, dir string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "lockstep test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(filepath.Join(dir, "cert.pem"), cert, 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
