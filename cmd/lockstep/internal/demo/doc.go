// Package demo is `lockstep demo`: the whole loop on one machine, for real.
//
// It starts what a cluster would run, each as a process of its own: a
// supervised training job of 8 ranks on 2 logical nodes (or of a rank a GPU), an
// agent a node, a master, Prometheus, Alertmanager and the remediator. Then it breaks
// something and tells, from what each of those says by itself, how the fault
// becomes a verdict, an alert, a webhook, an action, and a running job again.
package demo
