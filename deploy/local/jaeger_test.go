package local_test

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/deploy/local"
)

// Jaeger takes minutes to build the first time: make test-tracing.
func TestTracing(t *testing.T) {
	if os.Getenv("LOCKSTEP_TEST_TRACING") == "" {
		t.Skip("LOCKSTEP_TEST_TRACING is not set: make test-tracing sets it, and has Jaeger built")
	}
	tracing, err := local.StartTracing(t.Context(), local.Config{Dir: t.TempDir(), Progress: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tracing.Stop)
	resp, err := http.Post(tracing.HTTP+"/v1/traces", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("OTLP over HTTP: %s", resp.Status)
	}
	resp, err = http.Get(tracing.URL + "/api/v3/services")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var services struct{ Services []string }
	if err := json.NewDecoder(resp.Body).Decode(&services); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("%s, %v", resp.Status, err)
	}
	if refuses("http://" + tracing.GRPC) {
		t.Error("nothing listens for OTLP over gRPC")
	}
	for _, page := range []string{tracing.Page(), strings.ReplaceAll(tracing.TracePage(""), "/api/v3/traces/", "/api/v3/services")} {
		resp, err := http.Get(page)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || strings.Contains(string(text), "not the Jaeger UI") {
			t.Errorf("%s is no page to look at: %s, %v\n%.300s", page, resp.Status, err, text)
		}
	}
	tracing.Stop()
	if !refuses(tracing.URL) {
		t.Error("it still listens after Stop")
	}
}
