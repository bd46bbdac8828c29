package local

import (
	"fmt"
	"os"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

type object map[string]any

func prometheusConfig(cfg Config, alertmanager string) object {
	var scrapes []object
	for _, t := range cfg.Targets {
		scrapes = append(scrapes, cfg.Web.ask(object{"job_name": t.Job, "static_configs": []object{{"targets": t.Addresses}}}, true))
	}
	return object{
		"global": object{
			"scrape_interval":                  promDuration(cfg.Interval),
			"scrape_timeout":                   promDuration(cfg.Interval),
			"evaluation_interval":              promDuration(cfg.Interval),
			"scrape_native_histograms":         true,
			"always_scrape_classic_histograms": true,
		},
		"rule_files":     cfg.RuleFiles,
		"scrape_configs": scrapes,
		"alerting":       object{"alertmanagers": []object{cfg.Web.ask(object{"static_configs": []object{{"targets": []string{alertmanager}}}}, true)}},
		"storage":        object{"exemplars": object{"max_exemplars": 100_000}},
		"otlp":           object{"promote_resource_attributes": []string{"service.name", "service.instance.id", "host.name"}},
	}
}

func alertmanagerConfig(cfg Config) object {
	// Alerts without an incident are for people, who look at Prometheus here.
	route := object{
		"receiver": "people",
		// One group an incident: the first notification of a new one waits for nobody.
		"group_by":        []string{names.LabelJob, names.LabelIncident, "alertname"},
		"group_wait":      "0s",
		"group_interval":  "1s",
		"repeat_interval": promDuration(cfg.RepeatInterval),
	}
	receivers := []object{{"name": "people"}}
	if cfg.WebhookURL != "" {
		hook := object{"url": cfg.WebhookURL, "send_resolved": true}
		client := object{}
		if cfg.WebhookCredentialsFile != "" {
			client["authorization"] = object{"credentials_file": cfg.WebhookCredentialsFile}
		}
		if strings.HasPrefix(cfg.WebhookURL, "https:") {
			cfg.Web.ask(client, false)
		}
		if len(client) > 0 {
			hook["http_config"] = client
		}
		receivers = append(receivers, object{"name": "remediator", "webhook_configs": []object{hook}})
		route["routes"] = []object{{"receiver": "remediator", "matchers": []string{names.LabelIncident + `!=""`}}}
	}
	return object{"route": route, "receivers": receivers}
}

func promDuration(d time.Duration) string { return fmt.Sprintf("%dms", d.Milliseconds()) }

func writeYAML(path string, v any) error {
	data, err := yaml.Marshal(v)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return os.WriteFile(path, data, 0o600)
}
