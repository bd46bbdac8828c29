package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// others has the same remediator restart a plain Job, a PyTorchJob, and one that is not
// there: what its rights are for beside the campaign's JobSet. Of Kubeflow's operator there is
// as much as a suspended and a resumed PyTorchJob need.
func (b *kwokBed) others(c *campaign) {
	c.r.doom(-1, false)
	c.settle()
	b.until("a remediator leads", func() bool { c.r.revive(); return c.r.a.Leads() })
	b.write("others.yaml", kwokOthers)
	b.kubectl("apply", "-f", "others.yaml")
	b.until("the definition of PyTorchJobs is there", func() bool {
		_, err := b.client.Resource(pyTorchJobsGVR).Namespace(ns).List(b.t.Context(), metav1.ListOptions{})
		return err == nil
	})
	b.write("torch.yaml", "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: torch, namespace: training}\nspec: {pytorchReplicaSpecs: {Worker: {replicas: 2}}}\n")
	b.kubectl("apply", "-f", "torch.yaml")
	ctx, stop := context.WithCancel(b.t.Context())
	var operator sync.WaitGroup
	defer operator.Wait()
	defer stop()
	operator.Go(func() {
		for ; ctx.Err() == nil; time.Sleep(200 * time.Millisecond) {
			b.operate(ctx)
		}
	})
	for _, job := range []string{"plain", "torch"} {
		running := func() bool {
			n := 0
			for _, o := range b.list(podsGVR, ns, LabelJob+"="+job) {
				if text(o.Object, "status", "phase") == "Running" {
					n++
				}
			}
			return n == 2
		}
		b.until(job+" runs", running)
		ctx, cancel := context.WithTimeout(b.t.Context(), 3*time.Minute)
		answer, err := c.r.a.Act(ctx, remediation.Action{ID: "other-" + job, Job: job, Incident: "o", Kind: remediation.ActionRestart, Rank: -1, Reason: "of another kind"})
		cancel()
		if err != nil || answer.At.IsZero() || !running() {
			c.fatalf("%s: %+v, %v", job, answer, err)
		}
	}
	if _, err := c.r.a.Act(b.t.Context(), remediation.Action{ID: "other-none", Job: "nobody", Kind: remediation.ActionRestart, Rank: -1}); !errors.Is(err, remediation.ErrGone) {
		c.fatalf("a job that is not there: %v", err)
	}
}

// operate is one round of PyTorchJob's operator.
func (b *kwokBed) operate(ctx context.Context) {
	o, err := b.client.Resource(pyTorchJobsGVR).Namespace(ns).Get(ctx, "torch", metav1.GetOptions{})
	if err != nil {
		return
	}
	suspended, _, _ := unstructured.NestedBool(o.Object, "spec", "runPolicy", "suspend")
	pods := b.client.Resource(podsGVR).Namespace(ns)
	for i := range 2 {
		name := fmt.Sprintf("torch-worker-%d", i)
		if suspended {
			pods.Delete(ctx, name, metav1.DeleteOptions{})
			continue
		}
		refs := []any{obj{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "torch", "uid": string(o.GetUID()), "controller": true}}
		pods.Create(ctx, &unstructured.Unstructured{Object: obj{"apiVersion": "v1", "kind": "Pod",
			"metadata": obj{"name": name, "namespace": ns, "labels": obj{labelKubeflowJob: "torch", LabelJob: "torch"}, "ownerReferences": refs},
			"spec":     obj{"terminationGracePeriodSeconds": int64(1), "containers": []any{obj{"name": "c", "image": "torch"}}, "tolerations": []any{obj{"operator": "Exists"}}},
		}}, metav1.CreateOptions{}) // which fails when it is there
	}
}

const kwokOthers = `
apiVersion: batch/v1
kind: Job
metadata: {name: plain, namespace: training}
spec:
  parallelism: 2
  completions: 2
  completionMode: Indexed
  template:
    metadata: {labels: {lockstep.dev/job: plain}}
    spec: {restartPolicy: Never, terminationGracePeriodSeconds: 1, containers: [{name: c, image: plain}]}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: pytorchjobs.kubeflow.org}
spec:
  group: kubeflow.org
  scope: Namespaced
  names: {plural: pytorchjobs, singular: pytorchjob, kind: PyTorchJob}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`
