package otlp

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/sdk/resource"
)

// Protocol is an OTLP transport.
type Protocol string

const (
	GRPC Protocol = "grpc"
	HTTP Protocol = "http/protobuf"
)

// DefaultRatio is the share of healthy collectives that are traced unless
// OTEL_TRACES_SAMPLER says otherwise.
const DefaultRatio = 1.0 / 1000

// Config says where traces go and which. ConfigFromEnv reads it from the
// environment, as every OpenTelemetry program does; its zero value exports nothing.
type Config struct {
	// Endpoint is a gRPC target (host:port) or the complete URL to post to;
	// "" turns exporting off.
	Endpoint string
	Protocol Protocol
	Headers  map[string]string // may hold credentials: never logged
	Timeout  time.Duration     // of one attempt
	Gzip     bool
	TLS      *tls.Config // nil for plain text

	// Ratio is the share of healthy collectives to trace, decided by trace id
	// as the SDK's TraceIDRatioBased does, so that all ranks decide alike.
	// Anomalous collectives are always traced.
	Ratio float64

	// Resource describes the process: service.name, host.name and what the
	// environment adds. ccl.job.name is added per job.
	Resource *resource.Resource
}

// Enabled reports whether anything is exported.
func (c Config) Enabled() bool { return c.Endpoint != "" }

// ConfigFromEnv reads the OTEL_* variables of the process. service is the
// service.name, version the service.version and host the host.name unless the environment has its own. It
// returns an error for values that it cannot honour: a misspelt variable that
// silently sends traces nowhere is found too late.
//
// The protocol is HTTP, as the specification has it, unless OTEL_EXPORTER_OTLP_PROTOCOL is set or the
// endpoint's port is 4317, which is gRPC's.
//
// Honoured: OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER (otlp, none),
// OTEL_TRACES_SAMPLER with _ARG, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
// and OTEL_EXPORTER_OTLP_{ENDPOINT, PROTOCOL, HEADERS, TIMEOUT, COMPRESSION,
// CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY, INSECURE} with their _TRACES_
// variants. The sampler always_off turns everything off, anomalies included.
func ConfigFromEnv(service, version, host string) (Config, error) {
	c := Config{Protocol: HTTP, Ratio: DefaultRatio}
	if strings.EqualFold(env("OTEL_SDK_DISABLED"), "true") {
		return Config{}, nil
	}
	switch exporter := env("OTEL_TRACES_EXPORTER"); exporter {
	case "", "otlp":
	case "none":
		return Config{}, nil
	default:
		return Config{}, fmt.Errorf("OTEL_TRACES_EXPORTER=%s: use otlp or none", exporter)
	}
	if off, err := c.sampler(); off || err != nil {
		return Config{}, err
	}
	switch v := option("PROTOCOL"); v {
	case "":
		if port() == portGRPC { // the port that is gRPC's by convention
			c.Protocol = GRPC
		}
	case string(HTTP):
	case string(GRPC):
		c.Protocol = GRPC
	default:
		return Config{}, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%s: use grpc or http/protobuf", v)
	}
	plain, err := c.endpoint()
	if err != nil || c.Endpoint == "" {
		return Config{}, err
	}
	if !plain {
		if c.TLS, err = tlsConfig(); err != nil {
			return Config{}, err
		}
	}
	if c.Headers, err = headers(option("HEADERS")); err != nil {
		return Config{}, err
	}
	for key, value := range c.Headers {
		if !sendable(c.Protocol, key, value) {
			return Config{}, fmt.Errorf("OTEL_EXPORTER_OTLP_HEADERS: %s sends no header of the name %q, or not of that value", c.Protocol, key)
		}
	}
	c.Timeout = 10 * time.Second
	if v := option("TIMEOUT"); v != "" {
		ms, err := strconv.ParseUint(v, 10, 31)
		if err != nil || ms == 0 {
			return Config{}, fmt.Errorf("OTEL_EXPORTER_OTLP_TIMEOUT=%s: want milliseconds, above 0", v)
		}
		c.Timeout = time.Duration(ms) * time.Millisecond
	}
	switch v := option("COMPRESSION"); v {
	case "", "none":
	case "gzip":
		c.Gzip = true
	default:
		return Config{}, fmt.Errorf("OTEL_EXPORTER_OTLP_COMPRESSION=%s: use gzip or none", v)
	}
	if c.Resource, err = processResource(service, version, host); err != nil {
		return Config{}, err
	}
	return c, nil
}

const portGRPC = "4317"

// port is that of the endpoint, "" when it has none.
func port() string {
	v := cmp.Or(env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), env("OTEL_EXPORTER_OTLP_ENDPOINT"))
	if u, err := url.Parse(v); err == nil && u.Host != "" {
		return u.Port()
	}
	if _, p, err := net.SplitHostPort(v); err == nil {
		return p
	}
	return ""
}

// env returns a variable; empty means unset, by the specification.
func env(name string) string { return strings.TrimSpace(os.Getenv(name)) }

// option returns an exporter setting, the one for traces before the one for all signals.
func option(name string) string {
	if v := env("OTEL_EXPORTER_OTLP_TRACES_" + name); v != "" {
		return v
	}
	return env("OTEL_EXPORTER_OTLP_" + name)
}

func (c *Config) sampler() (off bool, err error) {
	name := env("OTEL_TRACES_SAMPLER")
	switch strings.TrimPrefix(name, "parentbased_") { // a collective has no parent: the root sampler decides
	case "":
	case "always_on":
		c.Ratio = 1
	case "always_off":
		return true, nil
	case "traceidratio":
		c.Ratio = 1
		if arg := env("OTEL_TRACES_SAMPLER_ARG"); arg != "" {
			c.Ratio, err = strconv.ParseFloat(arg, 64)
			if err != nil || !(c.Ratio >= 0 && c.Ratio <= 1) {
				return false, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG=%s: want a share from 0 to 1", arg)
			}
		}
	default:
		return false, fmt.Errorf("OTEL_TRACES_SAMPLER=%s: use traceidratio, always_on or always_off", name)
	}
	return false, nil
}

// endpoint resolves the target and whether it is in plain text.
func (c *Config) endpoint() (plain bool, err error) {
	v, perSignal := env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), true
	if v == "" {
		v, perSignal = env("OTEL_EXPORTER_OTLP_ENDPOINT"), false
	}
	if v == "" {
		return false, nil
	}
	u, err := url.Parse(v)
	schemed := err == nil && u.Host != "" && (u.Scheme == "http" || u.Scheme == "https")
	switch {
	case c.Protocol == HTTP && schemed:
		// The general endpoint is a base to which the signal's path is added;
		// the one for traces is used as it is.
		if !perSignal {
			u.Path = path.Join("/", u.Path, "v1/traces")
		} else if u.Path == "" {
			u.Path = "/"
		}
		c.Endpoint = u.String()
		return u.Scheme == "http", nil
	case c.Protocol == HTTP:
		return false, fmt.Errorf("OTLP endpoint %q: want a URL such as http://localhost:4318 (for gRPC set OTEL_EXPORTER_OTLP_PROTOCOL=grpc)", shown(v))
	case schemed && u.User != nil:
		return false, fmt.Errorf("OTLP endpoint %q: gRPC takes no user and password from an endpoint; set OTEL_EXPORTER_OTLP_HEADERS=authorization=Basic%%20BASE64", shown(v))
	case schemed:
		c.Endpoint = u.Host
		return u.Scheme == "http", nil
	}
	// A bare gRPC target; a unix socket never leaves the machine.
	c.Endpoint = v
	plain, err = optedOutOfTLS()
	return plain || strings.HasPrefix(v, "unix:"), err
}

// shown is an endpoint without what may be a credential: user, password and query.
func shown(endpoint string) string {
	if u, err := url.Parse(endpoint); err == nil && u.Host != "" {
		return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
	}
	target, _, _ := strings.Cut(endpoint[strings.LastIndexByte(endpoint, '@')+1:], "?")
	return target
}

func optedOutOfTLS() (bool, error) {
	switch v := strings.ToLower(option("INSECURE")); v {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	default:
		return false, fmt.Errorf("OTEL_EXPORTER_OTLP_INSECURE=%s: use true or false", v)
	}
}

func tlsConfig() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if file := option("CERTIFICATE"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CERTIFICATE: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CERTIFICATE: %s holds no PEM certificate", file)
		}
	}
	cert, key := option("CLIENT_CERTIFICATE"), option("CLIENT_KEY")
	if (cert == "") != (key == "") {
		return nil, errors.New("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY: set both or neither")
	}
	if cert != "" {
		// Read for each handshake: certificates are replaced while agents run.
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(cert, key)
			if err != nil {
				return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE: %w", err)
			}
			return &pair, nil
		}
		if _, err := c.GetClientCertificate(nil); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// headers parses key=value,key2=value2 with percent-encoded values. Its errors
// name no value.
func headers(s string) (map[string]string, error) {
	if s == "" {
		return nil, nil
	}
	parsed := map[string]string{}
	for pair := range strings.SplitSeq(s, ",") {
		key, value, ok := strings.Cut(pair, "=")
		key = strings.TrimSpace(key)
		decoded, err := url.PathUnescape(strings.TrimSpace(value))
		if !ok || key == "" || err != nil {
			return nil, errors.New("OTEL_EXPORTER_OTLP_HEADERS: want key=value pairs separated by commas, values percent-encoded")
		}
		parsed[strings.ToLower(key)] = decoded
	}
	return parsed, nil
}

// sendable reports whether a protocol's client sends a header: with any other one, each request fails.
func sendable(p Protocol, key, value string) bool {
	grpc := p == GRPC
	for _, c := range []byte(key) {
		name := '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || strings.IndexByte("-_.", c) >= 0
		if !name && (grpc || strings.IndexByte("!#$%&'*+^`|~", c) < 0) {
			return false
		}
	}
	if grpc && strings.HasSuffix(key, "-bin") {
		return true // it is sent in base64
	}
	for _, c := range []byte(value) {
		if c < ' ' && (grpc || c != '\t') || c == 0x7f || c > 0x7f && grpc {
			return false
		}
	}
	return true
}
