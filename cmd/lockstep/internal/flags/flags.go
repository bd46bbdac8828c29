// Package flags holds what the command lines of several components share, so
// that a flag means the same everywhere and is named as in other exporters.
package flags

import (
	"log/slog"
	"os"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// Log is how a component logs, always to stderr.
type Log struct {
	Level  slog.Level `default:"info" placeholder:"LEVEL" help:"debug, info, warn or error (default: ${default})." env:"LOCKSTEP_LOG_LEVEL"`
	Format string     `default:"text" placeholder:"FORMAT" enum:"text,json" help:"text or json (default: ${default})."`
}

// Logger returns the logger.
func (f Log) Logger() *slog.Logger {
	o := &slog.HandlerOptions{Level: f.Level}
	if f.Format == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}

// Web is a component's HTTP listener.
type Web struct {
	ListenAddress string `name:"web.listen-address" placeholder:"HOST:PORT" default:"${listen}" help:"Address of /metrics and the other pages (default: ${listen})."`
	ConfigFile    string `name:"web.config.file" type:"existingfile" placeholder:"FILE" help:"TLS and basic authentication (exporter-toolkit's web configuration)."`
	OpenStatus    bool   `name:"web.insecure-status" help:"Show the status page, which names ranks, nodes and incidents, to whoever asks; without it and without --web.config.file it is for loopback only."`
	Pprof         string `name:"web.pprof-address" placeholder:"HOST:PORT" help:"Serve /debug/pprof on a listener of its own (default: not at all)."`
}

// Options fills in what all components have in common.
func (f *Web) Options(title, description string, log *slog.Logger) web.Options {
	return web.Options{
		Listen: f.ListenAddress, ConfigFile: f.ConfigFile, OpenStatus: f.OpenStatus, PprofListen: f.Pprof,
		Title: title, Description: description, Version: buildinfo.Version(), Log: log,
	}
}

// Build is what lockstep_build_info says.
func Build() prom.Build {
	return prom.Build{Version: buildinfo.Version(), Revision: buildinfo.Revision()}
}

// Certificates are those of this process, for its metrics.
func Certificates() (list []prom.Certificate) {
	for _, c := range wire.Certificates() {
		list = append(list, prom.Certificate{Expires: c.Expires, Unreadable: c.Err != nil})
	}
	return list
}

// TLS is mutual TLS between agents and masters.
type TLS struct {
	Cert       string `type:"existingfile" placeholder:"FILE" help:"Own certificate (PEM). With key and CA: mutual TLS between agents and masters; read again at each handshake."`
	Key        string `type:"existingfile" placeholder:"FILE" help:"Its key."`
	CA         string `type:"existingfile" placeholder:"FILE" help:"CA that signed the other side's certificate."`
	ServerName string `placeholder:"NAME" help:"Name in the master's certificate (default: the host dialled)."`
}

// Wire returns nil when no flag was given: plain text.
func (t *TLS) Wire() *wire.TLS {
	if *t == (TLS{}) {
		return nil
	}
	return &wire.TLS{CertFile: t.Cert, KeyFile: t.Key, CAFile: t.CA, ServerName: t.ServerName}
}
