package dashboards

import (
	"fmt"
	"slices"
	"strings"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/heatmap"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/statetimeline"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// panel says what a panel shows; its view says how.
type panel struct {
	title   string
	why     string // what a reader learns from it, and what is normal
	view    view
	width   uint32 // of 24
	height  uint32
	unit    string
	targets []target
	steps   []step   // colours from a value on
	values  []value  // words for values
	series  []value  // colours of lines, by name: value is the name, and text is not used
	none    string   // what it says when there is nothing to show, and why that is no fault; "": there always is
	alerts  []string // whose runbooks it links to
}

type target struct {
	expr     string
	legend   string
	unit     string // where it is not the panel's: its lines have an axis of their own
	exemplar bool   // shows the traces behind the histogram
}

type step struct {
	from  float64
	color string
}

type value struct {
	value, text, color string
}

// times is the unit of how often something is its usual.
const times = "suffix: ×"

const (
	good = "green"
	fair = "orange"
	bad  = "red"
)

// up and yes are the usual words for 0 and 1.
var (
	up  = []value{{"0", "down", bad}, {"1", "up", good}}
	yes = []value{{"0", "no", good}, {"1", "yes", bad}}
)

// Colours of states and results, which would else have those of their place in the alphabet.
var (
	processes = []value{{"running", "", good}, {"unknown", "", "#808080"}, {"gone", "", "purple"}, {"exited", "", "blue"}, {"disk_sleep", "", fair}, {"stopped", "", bad}}
	agents    = []value{{"connected", "", good}, {"disconnected", "", fair}, {"lost", "", bad}}
	results   = []value{{"ok", "", good}}
)

// view draws a panel: it sets what is special to one visualization.
type view func(*panel) (dashboard.Panel, error)

var dataSource = common.DataSourceRef{Type: cog.ToPtr("prometheus"), Uid: cog.ToPtr("${datasource}")}

// built is a value that needs no more building.
type built[T any] struct{ v T }

func (b built[T]) Build() (T, error) { return b.v, nil }

func (p *panel) Build() (dashboard.Panel, error) {
	out, err := p.view(p)
	if err != nil {
		return out, fmt.Errorf("panel %s: %w", p.title, err)
	}
	out.Title, out.Description = &p.title, &p.why
	out.Datasource = &dataSource
	out.GridPos = &dashboard.GridPos{W: p.width, H: p.height}
	for _, alert := range p.alerts {
		out.Links = append(out.Links, link("Runbook: "+alert, names.RunbookBase+"/"+alert+".md"))
	}
	if out.FieldConfig == nil {
		out.FieldConfig = dashboard.NewFieldConfigSource()
	}
	d := &out.FieldConfig.Defaults
	if p.unit != "" {
		d.Unit = &p.unit
	}
	d.Thresholds = p.thresholds()
	if len(p.values) > 0 {
		d.Mappings = append(d.Mappings, dashboard.ValueMapping{ValueMap: p.mapping()})
	}
	if len(out.Targets) == 0 {
		for i, t := range p.targets {
			out.Targets = append(out.Targets, t.build(i))
		}
	}
	if p.none != "" {
		d.NoValue = &p.none
	}
	for _, s := range p.series {
		out.FieldConfig.Overrides = append(out.FieldConfig.Overrides, dashboard.DashboardFieldConfigSourceOverrides{
			Matcher:    dashboard.MatcherConfig{Id: "byName", Options: s.value},
			Properties: []dashboard.DynamicConfigValue{{Id: "color", Value: map[string]string{"mode": "fixed", "fixedColor": s.color}}},
		})
	}
	for i, t := range p.targets {
		if t.unit != "" {
			out.FieldConfig.Overrides = append(out.FieldConfig.Overrides, dashboard.DashboardFieldConfigSourceOverrides{
				Matcher:    dashboard.MatcherConfig{Id: "byFrameRefID", Options: refID(i)},
				Properties: []dashboard.DynamicConfigValue{{Id: "unit", Value: t.unit}},
			})
		}
	}
	return out, nil
}

func refID(i int) string { return string(rune('A' + i)) }

func (t target) build(i int) variants.Dataquery {
	q := prometheus.NewDataquery()
	q.Expr, q.RefId = t.expr, cog.ToPtr(refID(i))
	q.Range, q.Instant = cog.ToPtr(true), cog.ToPtr(false)
	q.LegendFormat = &t.legend
	q.EditorMode = cog.ToPtr(prometheus.QueryEditorModeCode)
	q.Datasource = &dataSource
	if t.exemplar {
		q.Exemplar = cog.ToPtr(true)
	}
	return *q
}

// instant is the panel's targets as they are now, each a table.
func (p *panel) instant() []variants.Dataquery {
	var out []variants.Dataquery
	for i, t := range p.targets {
		q := t.build(i).(prometheus.Dataquery)
		q.Range, q.Instant = cog.ToPtr(false), cog.ToPtr(true)
		q.Format = cog.ToPtr(prometheus.PromQueryFormatTable)
		out = append(out, q)
	}
	return out
}

func (p *panel) thresholds() *dashboard.ThresholdsConfig {
	c := &dashboard.ThresholdsConfig{Mode: dashboard.ThresholdsModeAbsolute, Steps: []dashboard.Threshold{{Color: good}}}
	for _, s := range p.steps {
		c.Steps = append(c.Steps, dashboard.Threshold{Value: &s.from, Color: s.color})
	}
	return c
}

func (p *panel) mapping() *dashboard.ValueMap {
	m := dashboard.NewValueMap()
	for i, v := range p.values {
		m.Options[v.value] = dashboard.ValueMappingResult{Text: &v.text, Color: &v.color, Index: cog.ToPtr(int32(i))}
	}
	return m
}

func link(title, url string) dashboard.DashboardLink {
	return dashboard.DashboardLink{Title: title, Type: dashboard.DashboardLinkTypeLink, Icon: "doc", Url: &url, Tags: []string{}, TargetBlank: true}
}

// lines draws values over time.
func lines(p *panel) (dashboard.Panel, error) { return graph(p, common.StackingModeNone).Build() }

// stacked draws parts of a whole over time.
func stacked(p *panel) (dashboard.Panel, error) { return graph(p, common.StackingModeNormal).Build() }

func graph(p *panel, mode common.StackingMode) *timeseries.PanelBuilder {
	b := timeseries.NewPanelBuilder().
		LineWidth(1).FillOpacity(0).ShowPoints(common.VisibilityModeNever).Min(0).
		Legend(common.NewVizLegendOptionsBuilder().DisplayMode(common.LegendDisplayModeList).Placement(common.LegendPlacementBottom).ShowLegend(true)).
		Tooltip(common.NewVizTooltipOptionsBuilder().Mode(common.TooltipDisplayModeMulti).Sort(common.SortOrderDescending))
	if mode != common.StackingModeNone {
		b.FillOpacity(40).Stacking(common.NewStackingConfigBuilder().Mode(mode))
	}
	if len(p.steps) > 0 {
		b.ThresholdsStyle(common.NewGraphThresholdsStyleConfigBuilder().Mode(common.GraphThresholdsStyleModeDashed))
	}
	return b
}

// number shows the last value, large.
func number(p *panel) (dashboard.Panel, error) {
	color := common.BigValueColorModeBackground
	if len(p.steps) == 0 && len(p.values) == 0 {
		color = common.BigValueColorModeNone // a measure: green would say that it is well
	}
	return stat.NewPanelBuilder().
		GraphMode(common.BigValueGraphModeNone).ColorMode(color).TextMode(common.BigValueTextModeAuto).
		ReduceOptions(common.NewReduceDataOptionsBuilder().Calcs([]string{"lastNotNull"})).
		Build()
}

// timeline shows states over time, a line each.
func timeline(p *panel) (dashboard.Panel, error) {
	out, err := statetimeline.NewPanelBuilder().
		ShowValue(common.VisibilityModeNever).MergeValues(true).RowHeight(0.8).FillOpacity(80).
		Legend(common.NewVizLegendOptionsBuilder().ShowLegend(false)).
		Build()
	if out.FieldConfig != nil {
		out.FieldConfig.Defaults.Color = &dashboard.FieldColor{Mode: dashboard.FieldColorModeIdThresholds}
	}
	return out, err
}

// heat shows a native histogram's buckets over time.
func heat(p *panel) (dashboard.Panel, error) {
	return heatmap.NewPanelBuilder().
		Calculate(false).
		Color(heatmap.NewHeatmapColorOptionsBuilder().Mode(heatmap.HeatmapColorModeScheme).Scheme("Oranges").Scale(heatmap.HeatmapColorScaleExponential).Exponent(0.5).Steps(64)).
		YAxis(heatmap.NewYAxisConfigBuilder().Unit(p.unit)).
		Tooltip(built[heatmap.HeatmapTooltip]{heatmap.HeatmapTooltip{Mode: common.TooltipDisplayModeSingle, YHistogram: cog.ToPtr(true)}}).
		Build()
}

// widths are those of columns in pixels where an equal share is too much or too little.
var widths = map[string]int{
	names.LabelClass: 200, names.LabelLevel: 100, names.LabelAttempt: 80, names.LabelRank: 60, names.LabelPeer: 60, names.LabelPort: 60,
	names.LabelRail: 60, names.LabelGPU: 60, names.LabelXid: 70, names.LabelDriver: 110, names.LabelModel: 120,
}

// rows lists label sets of now; columns says which, in order. "Value as NAME" is the value.
func rows(columns ...string) view {
	return func(p *panel) (dashboard.Panel, error) {
		exclude := map[string]bool{"Time": true, "Value": true, "__name__": true, "job": true, "instance": true}
		order, rename := map[string]int{}, map[string]string{}
		type override struct {
			column string
			width  int
		}
		var wide []override
		for i, c := range columns {
			c, name, named := strings.Cut(c, " as ")
			if named {
				rename[c] = name
			}
			order[c] = i
			delete(exclude, c)
			if w, ok := widths[c]; ok {
				wide = append(wide, override{c, w})
			}
		}
		b := table.NewPanelBuilder().MinWidth(90).
			WithTransformation(dashboard.DataTransformerConfig{Id: "organize", Options: map[string]any{"excludeByName": exclude, "indexByName": order, "renameByName": rename}})
		for _, o := range wide {
			b.OverrideByName(o.column, []dashboard.DynamicConfigValue{{Id: "custom.width", Value: o.width}})
		}
		if slices.Contains(columns, names.LabelTraceID) {
			b.OverrideByName(names.LabelTraceID, []dashboard.DynamicConfigValue{
				{Id: "links", Value: []dashboard.DashboardLink{link("Trace", traceURL)}},
				{Id: "noValue", Value: "no trace"},
			})
		}
		out, err := b.Build()
		out.Targets = p.instant()
		return out, err
	}
}

// matrix crosses two numeric labels of now: a row each value of one, a column
// each of the other, the value as the cell's colour.
func matrix(row, column string) view { return crossed(row, column, true) }

// cells crosses two labels that are names.
func cells(row, column string) view { return crossed(row, column, false) }

func crossed(row, column string, numeric bool) view {
	return func(p *panel) (dashboard.Panel, error) {
		background := common.NewTableColoredBackgroundCellOptions()
		background.Mode = cog.ToPtr(common.TableCellBackgroundDisplayModeBasic)
		sorted := func(label string) dashboard.DataTransformerConfig {
			return dashboard.DataTransformerConfig{Id: "sortBy", Options: map[string]any{"fields": map[string]any{}, "sort": []map[string]any{{"field": label}}}}
		}
		b := table.NewPanelBuilder().
			CellOptions(common.TableCellOptions{TableColoredBackgroundCellOptions: background}).
			Align(common.FieldTextAlignmentCenter).MinWidth(44).CellHeight(common.TableCellHeightSm).Decimals(1).
			ColorScheme(built[dashboard.FieldColor]{dashboard.FieldColor{Mode: dashboard.FieldColorModeIdThresholds}})
		if numeric {
			// groupingToMatrix keeps the order that it meets, and "10" sorts before "2".
			numbers := []map[string]any{{"targetField": row, "destinationType": "number"}, {"targetField": column, "destinationType": "number"}}
			b.WithTransformation(dashboard.DataTransformerConfig{Id: "convertFieldType", Options: map[string]any{"fields": map[string]any{}, "conversions": numbers}})
		}
		out, err := b.
			WithTransformation(sorted(column)).
			WithTransformation(sorted(row)).
			WithTransformation(dashboard.DataTransformerConfig{Id: "groupingToMatrix", Options: map[string]any{"rowField": row, "columnField": column, "valueField": "Value", "emptyValue": "null"}}).
			Mappings([]dashboard.ValueMapping{{SpecialValueMap: &dashboard.SpecialValueMap{Type: dashboard.MappingTypeSpecialValue, Options: dashboard.DashboardSpecialValueMapOptions{
				Match:  dashboard.SpecialValueMatchNullAndNan,
				Result: dashboard.ValueMappingResult{Text: cog.ToPtr("–"), Color: cog.ToPtr("transparent")},
			}}}}).
			// The first column is ranks or switches, not values.
			OverrideByName(row+"\\"+column, []dashboard.DynamicConfigValue{{Id: "custom.cellOptions", Value: map[string]any{"type": "auto"}}, {Id: "decimals", Value: 0}}).
			Build()
		out.Targets = p.instant()
		return out, err
	}
}

// traceURL opens a trace id in Explore with the data source of variable traces.
const traceURL = `/explore?schemaVersion=1&panes={"t":{"datasource":"${traces}","queries":[{"refId":"A","queryType":"traceql","query":"${__value.raw}"}],"range":{"from":"${__from}","to":"${__to}"}}}`
