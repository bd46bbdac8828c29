// Package kubernetes carries out remediation's actions on a Kubernetes cluster: it
// restarts jobs through the controllers that own their pods, takes nodes out, puts spares
// in, and removes what a dead node keeps from ending, once that is fenced.
//
// In flow actions with an id; out flow a few requests to the API server, each a
// compare-and-swap on the object's resource version or a create with a name that follows from
// the id. What was decided is written onto the job's own object before it is carried out
// (annotation lockstep.dev/actions), so that a remediator that is killed at any point, or
// another one in its place, goes on where the last one was, and does nothing twice.
//
//	job.go      from a job's name to its pods and the object that owns them
//	rank.go     from a culprit to its pod and node
//	act.go      the steps of an action, and their record
//	restart.go  how each kind of owner is restarted
//	node.go     a node is taken out, and returns
//	dead.go     a node that is silent: fence, then delete its pods by force
//	pool.go     spares
//	keeper.go   what happens without an alert: nodes return, pods that cannot end
//	lead.go     one remediator at a time
//
// The package judges no rank: the verdict is the master's. It makes no pods, changes no
// pod template, and needs no right that deploy/kubernetes/rbac.yaml does not name.
package kubernetes
