package dashboards

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Dashboard is one dashboard as Grafana imports it.
type Dashboard struct {
	UID   string
	Title string
	JSON  []byte // classic (v1) schema, indented, ends with a newline
}

// board is a dashboard before it is rendered.
type board struct {
	uid, title, why string
	variables       []variable
	rows            []row
}

type row struct {
	title  string
	panels []panel
}

func boards() []board {
	return []board{fleet(), job(), communicator(), node(), gpu(), fabric(), pipeline()}
}

// Config holds what an operator may want otherwise; the zero Config is what json/ has.
type Config struct {
	// RunbookBase is the URL that a page's name, and RunbookSuffix, are added to.
	RunbookBase, RunbookSuffix string
	// Tags are beside Lockstep's own.
	Tags []string
}

// All renders every dashboard.
func All() ([]Dashboard, error) { return With(Config{}) }

// With renders every dashboard as c has it.
func With(c Config) ([]Dashboard, error) {
	var all []Dashboard
	for _, b := range boards() {
		model, err := b.build()
		if err != nil {
			return nil, fmt.Errorf("dashboard %s: %w", b.uid, err)
		}
		model.Tags = append(model.Tags, c.Tags...)
		var out bytes.Buffer
		enc := json.NewEncoder(&out)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		if err := enc.Encode(model); err != nil {
			return nil, fmt.Errorf("dashboard %s: %w", b.uid, err)
		}
		all = append(all, Dashboard{UID: b.uid, Title: b.title, JSON: c.runbooks(out.Bytes())})
	}
	return all, nil
}

var runbook = regexp.MustCompile(regexp.QuoteMeta(names.RunbookBase+"/") + `(\w+)\.md`)

// runbooks leads links to where this operator has the pages.
func (c Config) runbooks(model []byte) []byte {
	if c.RunbookBase == "" {
		return model
	}
	return runbook.ReplaceAllFunc(model, func(url []byte) []byte {
		text, _ := json.Marshal(strings.TrimSuffix(c.RunbookBase, "/") + "/" + string(runbook.FindSubmatch(url)[1]) + c.RunbookSuffix)
		return bytes.Trim(text, `"`)
	})
}

// Query is one query of one panel, with Grafana's variables still in it.
type Query struct {
	Dashboard string // uid
	Panel     string // title
	Expr      string
	Exemplars bool
}

// Queries lists every query of every panel, in reading order.
func Queries() []Query {
	var all []Query
	for _, b := range boards() {
		for _, r := range b.rows {
			for _, p := range r.panels {
				for _, t := range p.targets {
					all = append(all, Query{Dashboard: b.uid, Panel: p.title, Expr: t.expr, Exemplars: t.exemplar})
				}
			}
		}
	}
	return all
}

const tag = "lockstep"

func (b *board) build() (dashboard.Dashboard, error) {
	others := dashboard.DashboardLink{Title: "Lockstep", Type: dashboard.DashboardLinkTypeDashboards, Icon: "external link", Tags: []string{tag}, AsDropdown: true, IncludeVars: true, KeepTime: true}
	d := dashboard.NewDashboardBuilder(b.title).
		Uid(b.uid).Description(b.why).Tags([]string{tag}).
		Time("now-30m", "now").Refresh("10s").
		Timezone(common.TimeZoneBrowser).Tooltip(dashboard.DashboardCursorSyncCrosshair).
		Link(built[dashboard.DashboardLink]{others}).
		Annotation(annotation("Alerts", bad, alertsFiring, "{{alertname}}", "{{culprit}} {{reason}}")).
		Annotation(annotation("Restarts", "blue", restarts, "{{training_job}} restarted", ""))
	for _, v := range b.variables {
		m, err := v.model()
		if err != nil {
			return dashboard.Dashboard{}, err
		}
		d.WithVariable(built[dashboard.VariableModel]{m})
	}
	for _, r := range b.rows {
		d.WithRow(dashboard.NewRowBuilder(r.title))
		for i := range r.panels {
			d.WithPanel(&r.panels[i])
		}
	}
	out, err := d.Build()
	for i := range out.Panels {
		id := uint32(i + 1)
		if p := out.Panels[i].Panel; p != nil {
			p.Id = &id
		} else {
			out.Panels[i].RowPanel.Id = id
		}
	}
	return out, err
}

// Annotations on every dashboard.
var (
	alertsFiring = `ALERTS{alertname=~"Lockstep.*", alertstate="firing"}`
	restarts     = `changes(` + of(names.JobAttempt) + `[$__interval]) > 0`
)

func annotation(name, color, expr, title, text string) cog.Builder[dashboard.AnnotationQuery] {
	q := prometheus.NewDataquery()
	q.Expr, q.RefId = expr, &name
	return dashboard.NewAnnotationQueryBuilder().
		Name(name).Enable(true).IconColor(color).Datasource(dataSource).
		Expr(expr).Target(built[variants.Dataquery]{*q}).TitleFormat(title).TextFormat(text)
}

// variable is one of the dashboard's selectors.
type variable struct {
	name, label string
	plugin      string // of a data source variable
	values      string // else: the label_values query
	all         bool   // offers All, and several
}

var (
	vSource     = variable{name: "datasource", label: "Metrics", plugin: "prometheus"}
	vTraces     = variable{name: "traces", label: "Traces", plugin: "tempo"}
	vJob        = variable{name: "training_job", label: "Job", values: labelValues(of(names.CommMembers), names.LabelJob)}
	vJobs       = variable{name: "training_job", label: "Job", values: labelValues(of(names.CommMembers), names.LabelJob), all: true}
	vComm       = variable{name: "communicator", label: "Communicator", values: labelValues(of(names.CommMembers, inJob), names.LabelCommunicator)}
	vCollective = variable{name: "collective", label: "Collective", values: labelValues(of(names.Collectives, inJob, inComm), names.LabelCollective), all: true}
	vGPUNode    = variable{name: "node", label: "Node", values: labelValues(of(names.GPUInfo), "instance")}
	vNode       = variable{name: "node", label: "Node", values: labelValues(of(names.BuildInfo, `component="agent"`), "instance")}
)

func labelValues(series, label string) string { return "label_values(" + series + ", " + label + ")" }

func (v variable) model() (dashboard.VariableModel, error) {
	if v.plugin != "" {
		return dashboard.NewDatasourceVariableBuilder(v.name).Label(v.label).Type(v.plugin).Build()
	}
	b := dashboard.NewQueryVariableBuilder(v.name).Label(v.label).
		Datasource(dataSource).Query(dashboard.StringOrMap{String: &v.values}).Definition(v.values).
		Refresh(dashboard.VariableRefreshOnTimeRangeChanged).Sort(dashboard.VariableSortAlphabeticalAsc)
	if v.all {
		b.IncludeAll(true).AllValue(".*").Multi(true)
	}
	return b.Build()
}
