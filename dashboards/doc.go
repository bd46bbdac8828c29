// Package dashboards holds Lockstep's Grafana dashboards as Go.
//
// In: the metrics of exporters/names, which are the only ones a panel can show.
// Out: [All], classic dashboard JSON that every Grafana since 9 loads (json/ holds
// it, generated), and [Check], which runs every panel's query against a
// Prometheus and says which fail or show nothing.
//
// From the question "do steps go on?" inwards: the fleet, one job, one communicator
// with its delay matrix, one node, GPUs, the fabric, and the pipeline itself. Each
// variable and link leads from one to the next. Panels that belong to an alert
// link to its runbook. Exemplars lead to traces when the Prometheus data source
// maps their label trace_id to a tracing data source.
//
// A colour is a judgement: what only measures has none. A panel that may be empty
// says why where its data would be. render/ draws all of them with Grafana's own
// components in a browser (make test-dashboards-render).
package dashboards

//go:generate go run ./internal/gen -o json
