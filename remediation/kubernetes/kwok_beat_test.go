package kubernetes

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

// beat renews the leases of the pool's nodes as a kubelet does: each quarter of their
// duration, and again at once when that fails. KWOK's own renewal skips a turn when its cache
// lags, which a busy machine makes it do, and looks like a kubelet that is silent.
type beat struct {
	b    *kwokBed
	stop chan struct{}
	wg   sync.WaitGroup

	mu  sync.Mutex
	off map[string]bool
}

const leaseSeconds = 40 // as kubelets have it

func (b *kwokBed) beats(nodes []string) *beat {
	h := &beat{b: b, stop: make(chan struct{}), off: map[string]bool{}}
	todo := make(chan string)
	for range 16 {
		h.wg.Go(func() {
			for node := range todo {
				h.renew(node)
			}
		})
	}
	h.wg.Go(func() {
		defer close(todo)
		for {
			began := time.Now()
			for i, node := range nodes {
				select {
				case <-h.stop:
					return
				case todo <- node:
				}
				time.Sleep(time.Until(began.Add(leaseSeconds * time.Second / 4 * time.Duration(i) / time.Duration(len(nodes)))))
			}
		}
	})
	b.t.Cleanup(func() { close(h.stop); h.wg.Wait() })
	return h
}

func (h *beat) power(node string, on bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.off[node] = !on
}

func (h *beat) renew(node string) {
	leases := h.b.client.Resource(leasesGVR).Namespace(leaseNamespace)
	for range 5 {
		h.mu.Lock()
		off := h.off[node]
		h.mu.Unlock()
		if off {
			return
		}
		now := time.Now().UTC().Format("2006-01-02T15:04:05.000000Z07:00")
		spec := obj{"holderIdentity": node, "leaseDurationSeconds": int64(leaseSeconds), "renewTime": now}
		body, err := json.Marshal(obj{"spec": spec})
		if err == nil {
			_, err = leases.Patch(h.b.t.Context(), node, types.MergePatchType, body, metav1.PatchOptions{})
		}
		if apierrors.IsNotFound(err) {
			_, err = leases.Create(h.b.t.Context(), &unstructured.Unstructured{Object: obj{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": obj{"name": node}, "spec": spec}}, metav1.CreateOptions{})
		}
		if err == nil || h.b.t.Context().Err() != nil {
			return
		}
	}
}

func pooled(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("n%04d", i))
	}
	return names
}
