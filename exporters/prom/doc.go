// Package prom publishes an agent's and a master's state to Prometheus.
//
// In flow snapshots (collector.AgentSnapshot, collector.MasterSnapshot), read
// at each scrape and never waited for, and on the agent every folded
// collective, through the Sink that Agent implements. Out flows /metrics: text,
// OpenMetrics with exemplars, and protobuf with native histograms.
//
// Series are bounded: no label of the pipeline's grows with ranks or time, each
// family has a cap with an overflow counter, and the series of a communicator that
// was left expire. A scrape takes no lock that the agent's fold could wait
// for longer than it takes to walk the communicators of the node.
//
// It computes nothing: rates, quantiles and alerts are the server's work.
package prom
