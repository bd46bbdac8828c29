package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/ports"
)

// Names of the two servers, for Kill and Restart.
const (
	Prometheus   = "prometheus"
	Alertmanager = "alertmanager"
)

// Config describes a Stack. Dir is required; the zero value of all else is usable.
type Config struct {
	// Dir holds configurations, data and logs; it is made 0700 and stays after Stop.
	Dir string
	// Targets are scraped; each address is host:port and serves /metrics.
	Targets []Target
	// RuleFiles are absolute paths (or relative to Dir) of Prometheus rules.
	RuleFiles []string
	// WebhookURL receives Alertmanager's notifications of alerts that carry an
	// incident, which are verdicts; none are sent when it is empty.
	WebhookURL string
	// WebhookCredentialsFile holds the bearer token sent to WebhookURL; "" sends none.
	WebhookCredentialsFile string
	// Web closes the pages of both servers, and says how they ask each other, the targets and
	// the webhook; nil for plain HTTP without a password.
	Web *Web
	// Interval is the scrape and evaluation interval; default 500 ms, at least 50 ms.
	Interval time.Duration
	// RepeatInterval is after how long Alertmanager tells of an alert again; default 1 min.
	RepeatInterval time.Duration
	// Retention bounds what Prometheus keeps; default 6 h.
	Retention time.Duration
	// Ports on 127.0.0.1; 0 picks a free one.
	PrometheusPort, AlertmanagerPort int
	// ReadyTimeout bounds how long each server may take to start; default 60 s.
	ReadyTimeout time.Duration
	// Progress receives Find's lines while tools are built; may be nil.
	Progress io.Writer
}

// Target is one scrape job.
type Target struct {
	Job       string
	Addresses []string
}

// Stack is a running Prometheus and Alertmanager. Its methods are safe for
// concurrent use.
type Stack struct {
	PrometheusURL   string
	AlertmanagerURL string

	cfg    Config
	held   *ports.Held // servers start again at their addresses
	failed chan error

	mu      sync.Mutex
	servers []*server
	stopped bool
}

// Start finds the programs, writes their configurations and returns when both
// are ready. ctx bounds the start only; the caller calls Stop.
func Start(ctx context.Context, cfg Config) (*Stack, error) {
	if cfg.Dir == "" {
		return nil, errors.New("start prometheus and alertmanager: Config.Dir is empty")
	}
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	promPath, err := Find(ctx, Prometheus, cfg.Progress)
	if err != nil {
		return nil, err
	}
	amPath, err := Find(ctx, Alertmanager, cfg.Progress)
	if err != nil {
		return nil, err
	}
	return start(ctx, cfg, promPath, amPath)
}

func (c *Config) complete() error {
	setDefault(&c.Interval, 500*time.Millisecond)
	setDefault(&c.RepeatInterval, time.Minute)
	setDefault(&c.Retention, 6*time.Hour)
	setDefault(&c.ReadyTimeout, time.Minute)
	if c.Interval < 50*time.Millisecond {
		return fmt.Errorf("interval %v: at least 50ms", c.Interval)
	}
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return err
	}
	c.Dir = dir
	if c.WebhookCredentialsFile != "" {
		if c.WebhookCredentialsFile, err = filepath.Abs(c.WebhookCredentialsFile); err != nil {
			return err
		}
	}
	return os.MkdirAll(dir, 0o700)
}

func setDefault(d *time.Duration, v time.Duration) {
	if *d == 0 {
		*d = v
	}
}

func start(ctx context.Context, cfg Config, promPath, amPath string) (*Stack, error) {
	held, err := ports.Hold("127.0.0.1", 2)
	if err != nil {
		return nil, fmt.Errorf("ports for prometheus and alertmanager: %w", err)
	}
	promAddr, err := address(cfg.PrometheusPort, held.Addrs[0])
	if err != nil {
		return nil, errors.Join(fmt.Errorf("port for prometheus: %w", err), held.Close())
	}
	amAddr, err := address(cfg.AlertmanagerPort, held.Addrs[1])
	if err != nil {
		return nil, errors.Join(fmt.Errorf("port for alertmanager: %w", err), held.Close())
	}
	s := &Stack{PrometheusURL: cfg.Web.URL(promAddr), AlertmanagerURL: cfg.Web.URL(amAddr), cfg: cfg, held: held, failed: make(chan error, 8)}
	if err := s.start(ctx, promAddr, amAddr, promPath, amPath); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

// address is the wanted port's, or free.
func address(port int, free string) (string, error) {
	if port == 0 {
		return free, nil
	}
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

func (s *Stack) start(ctx context.Context, promAddr, amAddr, promPath, amPath string) error {
	cfg := s.cfg
	promConfig, amConfig := filepath.Join(cfg.Dir, "prometheus.yml"), filepath.Join(cfg.Dir, "alertmanager.yml")
	if err := writeYAML(promConfig, prometheusConfig(cfg, amAddr)); err != nil {
		return err
	}
	if err := writeYAML(amConfig, alertmanagerConfig(cfg)); err != nil {
		return err
	}
	client, err := cfg.Web.Client()
	if err != nil {
		return err
	}
	var closed []string
	if cfg.Web != nil {
		web := filepath.Join(cfg.Dir, "web.yml")
		if err := cfg.Web.WriteConfig(web, false); err != nil {
			return err
		}
		closed = []string{"--web.config.file=" + web}
	}
	am := &server{
		name: Alertmanager, path: amPath, url: s.AlertmanagerURL, log: filepath.Join(cfg.Dir, "alertmanager.log"),
		args: []string{
			"--config.file=" + amConfig,
			"--storage.path=" + filepath.Join(cfg.Dir, "alertmanager"),
			"--web.listen-address=" + amAddr,
			"--web.external-url=" + s.AlertmanagerURL,
			"--cluster.listen-address=", // alone: no gossip, no port
		},
	}
	prom := &server{
		name: Prometheus, path: promPath, url: s.PrometheusURL, log: filepath.Join(cfg.Dir, "prometheus.log"),
		args: []string{
			"--config.file=" + promConfig,
			"--storage.tsdb.path=" + filepath.Join(cfg.Dir, "prometheus"),
			"--storage.tsdb.retention.time=" + promDuration(cfg.Retention),
			"--web.listen-address=" + promAddr,
			"--web.external-url=" + s.PrometheusURL,
			"--web.enable-otlp-receiver",
			"--enable-feature=exemplar-storage",
			// Hidden; its default lets 5 s pass before the first scrape.
			"--scrape.discovery-reload-interval=" + promDuration(cfg.Interval),
			// An Alertmanager that was restarted hears of firing alerts again this soon.
			"--rules.alert.resend-delay=" + promDuration(max(time.Second, 4*cfg.Interval)),
		},
	}
	s.servers = []*server{am, prom} // Prometheus last: it alerts as soon as it is up
	for _, srv := range s.servers {
		srv.args, srv.client = append(srv.args, closed...), client
	}
	for _, srv := range s.servers {
		if err := s.launch(ctx, srv); err != nil {
			return err
		}
	}
	return nil
}

// launch starts a server, waits until it is ready and watches it from then on.
func (s *Stack) launch(ctx context.Context, srv *server) error {
	if err := srv.start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.ReadyTimeout, fmt.Errorf("not ready after %v", s.cfg.ReadyTimeout))
	defer cancel()
	if err := srv.ready(ctx); err != nil {
		srv.child.stop(0)
		return err
	}
	go s.watch(srv, srv.child)
	return nil
}

func (s *Stack) watch(srv *server, c *child) {
	<-c.done
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || srv.child != c { // Stop, Kill and Restart take it away first
		return
	}
	srv.child = nil
	select {
	case s.failed <- srv.exited(c):
	default: // nobody has read the last eight
	}
}

// Failed delivers an error, with the end of the log, for each server that
// ended by itself. It is never closed.
func (s *Stack) Failed() <-chan error { return s.failed }

// LogFile returns the path of a server's log.
func (s *Stack) LogFile(name string) string { return filepath.Join(s.cfg.Dir, name+".log") }

// Kill ends a server with SIGKILL, as a crash would. It is no error when it
// does not run.
func (s *Stack) Kill(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	srv, err := s.server(name)
	if err != nil {
		return err
	}
	if c := srv.child; c != nil {
		srv.child = nil
		c.kill()
	}
	return nil
}

// Restart starts a server again, at its old address and with its old data, and
// returns when it is ready. It ends it first when it runs. ctx bounds the wait.
func (s *Stack) Restart(ctx context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	srv, err := s.server(name)
	if err != nil {
		return err
	}
	if c := srv.child; c != nil {
		srv.child = nil
		c.stop(stopPatience)
	}
	if err := s.launch(ctx, srv); err != nil {
		srv.child = nil
		return fmt.Errorf("restart: %w", err)
	}
	return nil
}

func (s *Stack) server(name string) (*server, error) {
	if s.stopped {
		return nil, errors.New("stack is stopped")
	}
	i := slices.IndexFunc(s.servers, func(srv *server) bool { return srv.name == name })
	if i < 0 {
		return nil, fmt.Errorf("no server %q: have %s, %s", name, Prometheus, Alertmanager)
	}
	return s.servers[i], nil
}

const stopPatience = 5 * time.Second

// Stop ends both servers and returns when they are gone: asked first, killed
// after 5 s. It may be called more than once.
func (s *Stack) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	var wg sync.WaitGroup
	for _, srv := range s.servers {
		if c := srv.child; c != nil {
			srv.child = nil
			wg.Go(func() { c.stop(stopPatience) })
		}
	}
	wg.Wait()
	_ = s.held.Close()
}
