package prom

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Certificate is how one of a process's own certificates is doing.
type Certificate struct {
	Expires    time.Time
	Unreadable bool // it, its key or its CA could not be read when they were last
}

// probe is a collector of constant metrics.
type probe struct {
	descs   []*prometheus.Desc
	collect func(ch chan<- prometheus.Metric, descs []*prometheus.Desc)
}

func (p *probe) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range p.descs {
		ch <- d
	}
}

func (p *probe) Collect(ch chan<- prometheus.Metric) { p.collect(ch, p.descs) }

// Certificates exports the worst of what list returns, and nothing while that is empty.
func Certificates(list func() []Certificate) prometheus.Collector {
	return &probe{[]*prometheus.Desc{Desc(names.CertUnreadable), Desc(names.CertExpiry)}, func(ch chan<- prometheus.Metric, descs []*prometheus.Desc) {
		certs := list()
		if len(certs) == 0 {
			return
		}
		unreadable, first := false, certs[0].Expires
		for _, c := range certs {
			unreadable = unreadable || c.Unreadable
			if c.Expires.Before(first) {
				first = c.Expires
			}
		}
		ch <- prometheus.MustNewConstMetric(descs[0], prometheus.GaugeValue, boolean(unreadable))
		ch <- prometheus.MustNewConstMetric(descs[1], prometheus.GaugeValue, float64(first.UnixNano())/1e9)
	}}
}

// Node exports what the agent's node is called.
func Node(name string) prometheus.Collector {
	info := GaugeVec(names.NodeInfo)
	info.WithLabelValues(valid(name)).Set(1)
	return info
}

// State exports whether a state directory can be written: when failing returns "".
func State(failing func() string) prometheus.Collector {
	return &probe{[]*prometheus.Desc{Desc(names.StateWritable)}, func(ch chan<- prometheus.Metric, descs []*prometheus.Desc) {
		ch <- prometheus.MustNewConstMetric(descs[0], prometheus.GaugeValue, boolean(failing() == ""))
	}}
}

// Crowded exports how many connections a listener has hung up on because there were too many.
func Crowded(listener string, hungUp func() uint64) prometheus.Collector {
	desc := prometheus.NewDesc(names.ConnsCrowded.Name, names.ConnsCrowded.Help, nil, prometheus.Labels{names.LabelListener: listener})
	return &probe{[]*prometheus.Desc{desc}, func(ch chan<- prometheus.Metric, descs []*prometheus.Desc) {
		ch <- prometheus.MustNewConstMetric(descs[0], prometheus.CounterValue, float64(hungUp()))
	}}
}

// Web exports whom a component's page has turned away.
func Web(s interface {
	HungUp() uint64
	Refused() map[string]uint64
}) prometheus.Collector {
	crowded := Crowded(names.ListenerWeb, s.HungUp)
	refused := Desc(names.WebRefused)
	return &probe{[]*prometheus.Desc{described(crowded), refused}, func(ch chan<- prometheus.Metric, _ []*prometheus.Desc) {
		crowded.Collect(ch)
		for reason, n := range s.Refused() {
			ch <- prometheus.MustNewConstMetric(refused, prometheus.CounterValue, float64(n), reason)
		}
	}}
}

// described is the one description of a collector.
func described(c prometheus.Collector) *prometheus.Desc {
	ch := make(chan *prometheus.Desc, 1)
	c.Describe(ch)
	return <-ch
}
