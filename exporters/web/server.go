package web

import (
	"context"
	"errors"
	"fmt"
	"html"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
	"time"

	toolkit "github.com/prometheus/exporter-toolkit/web"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/internal/crowd"
)

// Options configures a Server.
type Options struct {
	Listen      string // host:port; port 0 picks a free one
	ConfigFile  string // exporter-toolkit web configuration (TLS, users); "" for plain HTTP
	PprofListen string // host:port of a second listener for /debug/pprof; "" for none

	Title, Description, Version string // of the landing page

	Metrics http.Handler                     // /metrics
	Ready   func() error                     // /-/ready answers 503 with the error; nil is always ready
	Status  func() *collector.MasterSnapshot // serves the status page; nil for none
	Job     func() *collector.JobView        // where each rank stands, for that page; nil where nobody knows
	Links   Links                            // of that page
	// OpenStatus serves the status page to whoever asks, without a ConfigFile too.
	OpenStatus bool
	Log        *slog.Logger // default slog.Default
}

// shutdownGrace bounds how long Run waits for requests in flight.
const shutdownGrace = 5 * time.Second

// maxConns bounds the connections of a listener; /metrics is open to the network.
const maxConns = 512

// Server is a component's HTTP server.
type Server struct {
	opts    Options
	mux     *http.ServeMux
	listen  []listener
	refused refusals
}

type listener struct {
	*crowd.Listener
	server *http.Server
}

// New checks the configuration and binds the listeners, so that a bad file or
// a taken port fails before anything else starts. Follow it with Run, or with
// Close if it never comes to that.
func New(o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if err := toolkit.Validate(o.ConfigFile); err != nil {
		return nil, fmt.Errorf("web configuration %s: %w", o.ConfigFile, err)
	}
	s := &Server{opts: o, mux: http.NewServeMux(), refused: newRefusals()}
	links := []toolkit.LandingLinks{{Address: "metrics", Text: "Metrics"}}
	s.mux.Handle("GET /metrics", o.Metrics)
	s.mux.HandleFunc("GET /-/healthy", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "healthy")
	})
	s.mux.HandleFunc("GET /-/ready", s.ready)
	if o.Status != nil {
		status := &status{o.Status, o.Job, o.Links, time.Now}
		s.mux.HandleFunc("GET /status", s.local(status.html))
		s.mux.HandleFunc("GET /api/v1/status", s.local(status.json))
		s.mux.HandleFunc("GET /api/v1/ranks", s.local(status.ranks))
		s.mux.HandleFunc("GET /runbooks/{name}", runbookPage)
		links = append([]toolkit.LandingLinks{
			{Address: "status", Text: "Status", Description: "the job at a glance"},
			{Address: "api/v1/status", Text: "Status as JSON"},
		}, links...)
	}
	landing, err := toolkit.NewLandingPage(toolkit.LandingConfig{
		Name:        html.EscapeString(o.Title), // the page is a text/template
		Description: html.EscapeString(o.Description),
		Version:     html.EscapeString(o.Version),
		Links:       links,
		Profiling:   "false",
		HeaderColor: "#24425c",
	})
	if err != nil {
		return nil, fmt.Errorf("landing page: %w", err)
	}
	s.mux.Handle("GET /{$}", landing)

	if err := s.bind(o.Listen, s.mux, 30*time.Second); err != nil {
		return nil, err
	}
	if o.PprofListen != "" {
		if err := s.bind(o.PprofListen, profiling(), 0); err != nil { // a profile takes as long as it is asked to
			return nil, errors.Join(err, s.Close())
		}
	}
	return s, nil
}

func (s *Server) bind(addr string, h http.Handler, writeTimeout time.Duration) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("web server: %w", err)
	}
	server := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(s.opts.Log.Handler(), slog.LevelWarn),
	}
	server.BaseContext = func(net.Listener) context.Context {
		server.Handler = s.refused.counted(server.Handler) // around what asks for passwords, which toolkit.Serve has set by now
		return context.Background()
	}
	s.listen = append(s.listen, listener{crowd.Limit(l, maxConns, true), server})
	return nil
}

func profiling() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}

func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	if s.opts.Ready != nil {
		if err := s.opts.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
	}
	fmt.Fprintln(w, "ready")
}

// local lets a page that tells more than numbers out to this host only, unless the
// web configuration says who may see it. What counts is the address that was called:
// packets for loopback come from no other host.
func (s *Server) local(h http.HandlerFunc) http.HandlerFunc {
	if s.opts.ConfigFile != "" || s.opts.OpenStatus {
		return h
	}
	return func(w http.ResponseWriter, req *http.Request) {
		at, ok := req.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		if from, err := netip.ParseAddrPort(req.RemoteAddr); err != nil || !ok || !at.IP.IsLoopback() || !from.Addr().Unmap().IsLoopback() || !plainHost(req.Host) {
			s.refused.count(names.WebElsewhere)
			http.Error(w, "this page is for this host's loopback address only: set TLS and users in --web.config.file to see it from elsewhere", http.StatusForbidden)
			return
		}
		h(w, req)
	}
}

// plainHost reports whether a request names its host by address or as localhost. A
// page of elsewhere can have its own name resolve to loopback, and a browser on this
// host ask for that.
func plainHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	_, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil || host == "localhost"
}

// Handle adds a route, in http.ServeMux's syntax. Call it before Run.
func (s *Server) Handle(pattern string, h http.Handler) { s.mux.Handle(pattern, h) }

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listen[0].Addr() }

// HungUp returns how many connections were hung up on because a listener held too many.
func (s *Server) HungUp() (n uint64) {
	for _, l := range s.listen {
		n += l.HungUp()
	}
	return n
}

// Refused returns how many requests were refused, by reason.
func (s *Server) Refused() map[string]uint64 { return s.refused.all() }

// PprofAddr returns the profiling listener's address, nil when there is none.
func (s *Server) PprofAddr() net.Addr {
	if len(s.listen) < 2 {
		return nil
	}
	return s.listen[1].Addr()
}

// Run serves until ctx ends, then lets requests in flight finish for at most
// five seconds. It returns nil after such an end, else what stopped it.
func (s *Server) Run(ctx context.Context) error {
	failed := make(chan error, len(s.listen))
	for _, l := range s.listen {
		go func() {
			failed <- toolkit.Serve(l, l.server, &toolkit.FlagConfig{WebConfigFile: &s.opts.ConfigFile}, s.opts.Log)
		}()
	}
	var err error
	running := len(s.listen)
	select {
	case <-ctx.Done():
	case err = <-failed:
		running--
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer cancel()
	for _, l := range s.listen {
		if l.server.Shutdown(grace) != nil {
			l.server.Close()
		}
		l.Close() // not closed by Shutdown when Serve never got that far
	}
	for range running {
		if e := <-failed; err == nil && !errors.Is(e, http.ErrServerClosed) {
			err = e
		}
	}
	if err != nil {
		return fmt.Errorf("web server: %w", err)
	}
	return nil
}

// Close releases the listeners of a Server that was never run.
func (s *Server) Close() error {
	var errs []error
	for _, l := range s.listen {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
