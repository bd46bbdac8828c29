package monitoring

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lockstep-ccl/lockstep/rules"
)

// Config is what a site wants otherwise. All of a file is optional.
type Config struct {
	Rules        rules.Config `yaml:"rules"`
	Dashboards   Dashboards   `yaml:"dashboards"`
	Kubernetes   Kubernetes   `yaml:"kubernetes"`
	Alertmanager Alertmanager `yaml:"alertmanager"`
	Prometheus   Prometheus   `yaml:"prometheus"`
}

// Dashboards is how they are filed.
type Dashboards struct {
	Folder string   `yaml:"folder"`
	Tags   []string `yaml:"tags"` // beside lockstep
}

// Kubernetes is how the objects are found by the operator and the sidecar.
type Kubernetes struct {
	Namespace            string            `yaml:"namespace"`
	RuleLabels           map[string]string `yaml:"rule_labels"`           // as Prometheus's ruleSelector wants them
	DashboardLabels      map[string]string `yaml:"dashboard_labels"`      // as the sidecar's label
	DashboardAnnotations map[string]string `yaml:"dashboard_annotations"` // such as its folder annotation
}

// Alertmanager is where alerts go.
type Alertmanager struct {
	Remediator     string        `yaml:"remediator"` // URL of its webhook; "": there is none
	TokenFile      string        `yaml:"token_file"` // as Alertmanager sees it
	RepeatInterval time.Duration `yaml:"repeat_interval"`
}

// Prometheus is what the sample configuration scrapes.
type Prometheus struct {
	ScrapeInterval time.Duration `yaml:"scrape_interval"`
	Agents         []string      `yaml:"agents"`
	Masters        []string      `yaml:"masters"`
	Remediators    []string      `yaml:"remediators"`
	Planners       []string      `yaml:"planners"`
	Alertmanagers  []string      `yaml:"alertmanagers"`
}

// Default is what --defaults prints.
func Default() Config {
	return Config{
		Rules:      rules.DefaultConfig(),
		Dashboards: Dashboards{Folder: "Lockstep", Tags: []string{}},
		Kubernetes: Kubernetes{
			Namespace:            "monitoring",
			RuleLabels:           map[string]string{"release": "kube-prometheus-stack"},
			DashboardLabels:      map[string]string{"grafana_dashboard": "1"},
			DashboardAnnotations: map[string]string{"grafana_folder": "Lockstep"},
		},
		Alertmanager: Alertmanager{Remediator: "http://127.0.0.1:9410/webhook", TokenFile: "/etc/lockstep/token", RepeatInterval: time.Minute},
		Prometheus: Prometheus{
			ScrapeInterval: 5 * time.Second,
			Agents:         []string{"127.0.0.1:9400"}, Masters: []string{"127.0.0.1:9402"}, Remediators: []string{"127.0.0.1:9410"}, Planners: []string{}, Alertmanagers: []string{"127.0.0.1:9093"},
		},
	}
}

// Load reads a file, strictly; "" is the defaults.
func Load(file string) (Config, error) {
	c := Default()
	if file == "" {
		return c, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return c, err
	}
	if err := c.decode(data); err != nil {
		return c, fmt.Errorf("%s: %w", file, err)
	}
	return c, nil
}

func (c *Config) decode(data []byte) error {
	// A map in the file replaces the default, of which YAML would keep the other keys.
	var file Config
	if err := yaml.Unmarshal(data, &file); err == nil {
		for _, m := range []struct{ to, from *map[string]string }{
			{&c.Kubernetes.RuleLabels, &file.Kubernetes.RuleLabels}, {&c.Kubernetes.DashboardLabels, &file.Kubernetes.DashboardLabels},
			{&c.Kubernetes.DashboardAnnotations, &file.Kubernetes.DashboardAnnotations},
		} {
			if *m.from != nil {
				*m.to = nil
			}
		}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(c); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return errors.New("more than one YAML document")
	}
	return c.validate()
}

func (c *Config) validate() error {
	if err := c.Rules.Validate(); err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	for name, text := range map[string]string{"rules.runbook_base": c.Rules.RunbookBase, "rules.grafana_url": c.Rules.GrafanaURL, "alertmanager.remediator": c.Alertmanager.Remediator} {
		if u, err := url.Parse(text); err != nil || text != "" && (u.Scheme != "http" && u.Scheme != "https" || u.Host == "") {
			return fmt.Errorf("%s: %q: want a URL that begins with http:// or https://", name, text)
		}
	}
	if why := validation.IsDNS1123Label(c.Kubernetes.Namespace); len(why) > 0 {
		return fmt.Errorf("kubernetes.namespace: %q: %s", c.Kubernetes.Namespace, why[0])
	}
	for part, labels := range map[string]map[string]string{"rule_labels": c.Kubernetes.RuleLabels, "dashboard_labels": c.Kubernetes.DashboardLabels} {
		for k, v := range labels {
			if why := slices.Concat(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)); len(why) > 0 {
				return fmt.Errorf("kubernetes.%s: %s: %s: %s", part, k, v, why[0])
			}
		}
	}
	for k := range c.Kubernetes.DashboardAnnotations {
		if why := validation.IsQualifiedName(k); len(why) > 0 {
			return fmt.Errorf("kubernetes.dashboard_annotations: %s: %s", k, why[0])
		}
	}
	switch {
	case c.Prometheus.ScrapeInterval < 100*time.Millisecond:
		return fmt.Errorf("prometheus.scrape_interval: %v: want at least 100ms", c.Prometheus.ScrapeInterval)
	case c.Rules.Window < 4*c.Prometheus.ScrapeInterval:
		return fmt.Errorf("rules.window: %v: want at least four scrape intervals (prometheus.scrape_interval: %v), or rates are made of too few samples", c.Rules.Window, c.Prometheus.ScrapeInterval)
	case c.Alertmanager.RepeatInterval < time.Second:
		return fmt.Errorf("alertmanager.repeat_interval: %v: want at least 1s", c.Alertmanager.RepeatInterval)
	case c.Alertmanager.Remediator != "" && c.Alertmanager.TokenFile == "":
		return errors.New("alertmanager.token_file: missing: the remediator wants Alertmanager's token")
	}
	for name, list := range map[string][]string{"agents": c.Prometheus.Agents, "masters": c.Prometheus.Masters, "remediators": c.Prometheus.Remediators, "planners": c.Prometheus.Planners, "alertmanagers": c.Prometheus.Alertmanagers} {
		for _, addr := range list {
			if _, _, err := net.SplitHostPort(addr); err != nil {
				return fmt.Errorf("prometheus.%s: %q: want HOST:PORT", name, addr)
			}
		}
	}
	return nil
}

// write prints the configuration as a file of it.
func (c Config) write(out io.Writer) error {
	if _, err := io.WriteString(out, "# What lockstep rules and lockstep dashboards write, with the defaults. All of it is optional;\n# comments to each value are in rules/config.go and docs/operations.md.\n"); err != nil {
		return err
	}
	return encode(out, c)
}

func encode(out io.Writer, v any) error {
	enc := yaml.NewEncoder(out)
	enc.SetIndent(2)
	if err := enc.Encode(v); err != nil {
		return err
	}
	return enc.Close()
}

func duration(d time.Duration) string { return model.Duration(d).String() }
