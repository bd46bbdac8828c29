// Package dashboards holds Lockstep's Grafana dashboards as Go.
//
// In: the metrics of exporters/names, which are the only ones a panel can show.
// Out: [All], classic dashboard JSON that every Grafana since 9 loads (json/ holds
// it, generated), and [Check], which runs every panel's query against a
// Prometheus and says which fail or show nothing.
//
// Five dashboards, from the question "do steps go on?" inwards: the job, one
// communicator with its delay matrix, one node, GPUs, and the pipeline itself. Each
// variable and link leads from one to the next. Panels that belong to an alert
// link to its runbook. Exemplars lead to traces when the Prometheus data source
// maps their label trace_id to a tracing data source.
package dashboards

//go:generate go run ./internal/gen -o json
