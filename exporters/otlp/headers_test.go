package otlp_test

import (
	"fmt"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/lockstep-ccl/lockstep/exporters/otlp"
)

// Headers that ConfigFromEnv takes are those with which requests can be sent: all others stop the
// component at start, where somebody sees it.
func TestHeadersThatAreTakenAreSent(t *testing.T) {
	r := newReceiver()
	web := httptest.NewServer(r)
	t.Cleanup(web.Close)
	for protocol, endpoint := range map[otlp.Protocol]string{otlp.HTTP: web.URL, otlp.GRPC: "http://" + r.serveGRPC(t)} {
		for c := range 256 {
			for _, pair := range []string{fmt.Sprintf("x%cy=z", c), "xy=z" + url.PathEscape(string([]byte{byte(c)})) + "z", "xy-bin=z" + url.PathEscape(string([]byte{byte(c)}))} {
				setenv(t, map[string]string{"ENDPOINT": endpoint, "PROTOCOL": string(protocol)})
				if c == 0 {
					continue // no environment has it
				}
				t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", pair)
				config, err := otlp.ConfigFromEnv("lockstep-agent", "1.2.3", "gpu-01")
				if err != nil {
					continue
				}
				config.Timeout = bound
				if err := otlp.Send(config); err != nil {
					t.Errorf("%s: header %q: %v", protocol, pair, err)
				}
			}
		}
	}
}
