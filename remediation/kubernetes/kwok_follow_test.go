package kubernetes

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
)

// follow writes down each version of the pool's nodes and of the job that the API server has stored, by
// watches of its own. Where one ends, by the server's death, the next goes on at the version that was
// seen last.
func (b *kwokBed) follow() {
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	b.t.Cleanup(func() { stop(); all.Wait() })
	for _, w := range []struct {
		of       dynamic.ResourceInterface
		selector string
		see      func(*unstructured.Unstructured)
	}{
		{b.client.Resource(nodesGVR), LabelPool + "=gpu", func(o *unstructured.Unstructured) {
			if n, err := nodeFrom(o); err == nil {
				b.c.past.node(n)
			}
		}},
		{b.client.Resource(jobSetsGVR).Namespace(ns), "", func(o *unstructured.Unstructured) {
			b.c.past.job(int(number(o.Object, 0, "status", "restarts")), int(number(o.Object, 0, "status", "restartsCountTowardsMax")))
		}},
	} {
		all.Go(func() {
			for at := ""; ctx.Err() == nil; {
				at = watch(ctx, w.of, w.selector, at, w.see)
			}
		})
	}
}

// watch goes on from a version, "" for now, and returns the one to go on from.
func watch(ctx context.Context, of dynamic.ResourceInterface, selector, at string, see func(*unstructured.Unstructured)) string {
	if at == "" {
		list, err := of.List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			time.Sleep(100 * time.Millisecond)
			return ""
		}
		for i := range list.Items {
			see(&list.Items[i])
		}
		at = list.GetResourceVersion()
	}
	w, err := of.Watch(ctx, metav1.ListOptions{LabelSelector: selector, ResourceVersion: at, AllowWatchBookmarks: true})
	if err != nil {
		time.Sleep(100 * time.Millisecond)
		return at
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return at
		case e, ok := <-w.ResultChan():
			if !ok {
				return at
			}
			o, is := e.Object.(*unstructured.Unstructured)
			if !is || e.Type == "ERROR" {
				return "" // that version is not kept any more
			}
			if at = o.GetResourceVersion(); e.Type == "ADDED" || e.Type == "MODIFIED" {
				see(o)
			}
		}
	}
}
