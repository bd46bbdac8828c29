package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// herald stands in for Prometheus and Alertmanager where they are not wanted: of
// each confirmed incident in the master's metrics it tells the remediator what
// Alertmanager would.
type herald struct {
	c      *cluster
	cancel context.CancelFunc
	done   chan struct{}

	mu   sync.Mutex
	told map[string]map[string]string // labels by incident
}

func startHerald(c *cluster) *herald {
	ctx, cancel := context.WithCancel(context.Background())
	h := &herald{c: c, cancel: cancel, done: make(chan struct{}), told: map[string]map[string]string{}}
	go func() {
		defer close(h.done)
		t := time.NewTicker(c.interval)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
				_ = h.look(ctx) // the master or the remediator may be dead for a while
			}
		}
	}()
	return h
}

func (h *herald) stop() {
	h.cancel()
	<-h.done
}

// firing is the labels of the alerts that the last look found and told.
func (h *herald) firing() (all []map[string]string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.told {
		all = append(all, l)
	}
	return all
}

func (h *herald) look(ctx context.Context) error {
	open, err := h.confirmed(ctx)
	if err != nil {
		return err
	}
	h.mu.Lock()
	maps.DeleteFunc(h.told, func(id string, _ map[string]string) bool { return open[id] == nil })
	h.mu.Unlock()
	for id, l := range open {
		h.mu.Lock()
		_, told := h.told[id]
		h.mu.Unlock()
		if told {
			continue
		}
		if err := h.tell(ctx, id, l); err != nil {
			return err
		}
		h.mu.Lock()
		h.told[id] = l
		h.mu.Unlock()
	}
	return nil
}

// confirmed reads the confirmed incidents that are open from the master's metrics.
func (h *herald) confirmed(ctx context.Context) (map[string]map[string]string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.c.web.URL(h.c.master)+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := h.c.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return nil, fmt.Errorf("the master's metrics: %w", err)
	}
	open := map[string]map[string]string{}
	for _, m := range families[names.IncidentInfo.Name].GetMetric() {
		l := map[string]string{}
		for _, p := range m.GetLabel() {
			if p.GetValue() != "" {
				l[p.GetName()] = p.GetValue()
			}
		}
		if l[names.LabelLevel] == names.LevelConfirmed {
			l["alertname"], l["severity"] = "verdict", "no Prometheus: told by the demo itself"
			open[l[names.LabelIncident]] = l
		}
	}
	return open, nil
}

func (h *herald) tell(ctx context.Context, id string, labels map[string]string) error {
	body, err := json.Marshal(map[string]any{"version": "4", "alerts": []any{map[string]any{
		"status": "firing", "startsAt": time.Now(), "fingerprint": id, "labels": labels,
	}}})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.c.web.URL(h.c.remediator)+"/webhook", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+h.c.token)
	req.Header.Set("Content-Type", "application/json")
	resp, err := h.c.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("webhook: %s", resp.Status)
	}
	return nil
}
