package names_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

var (
	metricName = regexp.MustCompile(`^lockstep(_[a-z0-9]+)+$`)
	labelName  = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	nonBase    = regexp.MustCompile(`(^|_)(ns|us|ms|nanoseconds|microseconds|milliseconds|minutes|hours|bits|kilobytes|megabytes|mib|gib|percent)(_|$)`)
	baseUnits  = []string{"", "seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz"}
	typeWords  = regexp.MustCompile(`_(gauge|counter|histogram|summary|info_total)$`)
)

func TestMetricsFollowPrometheusConventions(t *testing.T) {
	labels := constants(t, "Label")
	seen := map[string]bool{}
	for _, m := range names.Metrics() {
		t.Run(m.Name, func(t *testing.T) {
			if seen[m.Name] {
				t.Error("defined twice")
			}
			seen[m.Name] = true
			if !metricName.MatchString(m.Name) {
				t.Error("want lower-case words with the prefix lockstep_")
			}
			if nonBase.MatchString(m.Name) {
				t.Error("not a base unit")
			}
			if typeWords.MatchString(m.Name) {
				t.Error("a type in the name")
			}
			if !slices.Contains(baseUnits, m.Unit) {
				t.Errorf("unit %q is not one of %q", m.Unit, baseUnits)
			}
			base, total := strings.CutSuffix(m.Name, "_total")
			if total != (m.Type == names.Counter) {
				t.Errorf("_total belongs on counters, and this is a %s", m.Type)
			}
			if m.Unit != "" && !strings.HasSuffix(base, "_"+m.Unit) {
				t.Errorf("want the name to end with its unit %q", m.Unit)
			}
			if m.Unit == "" && slices.ContainsFunc(baseUnits[1:3], func(u string) bool { return strings.HasSuffix(base, "_"+u) }) {
				t.Error("the name has a unit, the definition has none")
			}
			if m.Type == names.Histogram && m.Unit == "" {
				t.Error("a histogram needs a unit")
			}
			if !strings.HasSuffix(m.Help, ".") || strings.TrimSpace(m.Help) != m.Help || strings.ContainsAny(m.Help, "\n|") {
				t.Error("help is one or more sentences on one line")
			}
			if !slices.Contains([]names.Component{names.Agent, names.Master, names.Remediator, names.Preflight, names.Planner, names.Supervisor, names.All}, m.From) {
				t.Errorf("unknown component %q", m.From)
			}
			for i, l := range m.Labels {
				if !slices.Contains(labels, l) {
					t.Errorf("label %q is not one of the Label constants", l)
				}
				if slices.Contains(m.Labels[:i], l) {
					t.Errorf("label %q twice", l)
				}
				if !labelName.MatchString(l) || strings.HasPrefix(l, "__") || l == "le" || l == "job" || l == "instance" {
					t.Errorf("label %q is malformed or reserved", l)
				}
			}
		})
	}
}

// A rank, peer or the like as a label multiplies series by the size of the job.
func TestUnboundedLabelsOnlyWhereBounded(t *testing.T) {
	allowed := map[*names.Metric]bool{names.IncidentInfo: true, names.AgentLostInfo: true, names.NodeInfo: true, names.DelayRatio: true, names.ConnInfo: true,
		names.PreflightNodeGood: true, names.PreflightBandwidth: true, names.PreflightLatency: true, names.PreflightRankBandwidth: true,
		names.PreflightRankLatency: true, names.PreflightRankMemory: true, names.PreflightRankCompute: true}
	for _, m := range names.Metrics() {
		for _, l := range []string{names.LabelRank, names.LabelPeer, names.LabelNode, names.LabelIncident, names.LabelTraceID, names.LabelSrc, names.LabelDst} {
			if slices.Contains(m.Labels, l) && !allowed[m] {
				t.Errorf("%s has the label %s", m, l)
			}
		}
	}
}

func TestAttributesAreDocumentedOnce(t *testing.T) {
	var documented []string
	for _, a := range names.Attributes() {
		if slices.Contains(documented, a.Key) {
			t.Errorf("%s twice", a.Key)
		}
		documented = append(documented, a.Key)
		if !strings.HasPrefix(a.Key, "ccl.") || !strings.HasSuffix(a.Help, ".") || a.On == "" ||
			!slices.Contains([]string{"string", "string[]", "int", "double", "bool"}, a.Type) {
			t.Errorf("malformed: %+v", a)
		}
	}
	for _, key := range constants(t, "Attr") {
		if !slices.Contains(documented, key) {
			t.Errorf("attribute %s is not in Attributes", key)
		}
	}
}

func TestClassesAndLevelsAreThoseOfDiagnosis(t *testing.T) {
	var classes []string
	for _, c := range diagnosis.Classes() {
		classes = append(classes, c.String())
	}
	if !slices.Equal(classes, names.Classes) {
		t.Errorf("diagnosis has the classes %q, names has %q", classes, names.Classes)
	}
	for _, class := range names.Classes {
		if class == "" || names.VerdictAlerts[class] == "" {
			t.Errorf("class %q has no alert in VerdictAlerts", class)
		}
	}
	for effect, name := range map[diagnosis.XidEffect]string{
		diagnosis.XidUnknown: names.EffectUnknown, diagnosis.XidInfo: names.EffectInfo,
		diagnosis.XidApplication: names.EffectApplication, diagnosis.XidGPU: names.EffectGPU,
	} {
		if effect.String() != name {
			t.Errorf("diagnosis has the effect %q, names has %q", effect, name)
		}
	}
	if slow := strings.Join([]string{names.ThrottleSWThermal, names.ThrottleHWThermal, names.ThrottlePowerBrake}, ", "); diagnosis.SlowedDown.String() != slow {
		t.Errorf("diagnosis has the reasons %q, names has %q", diagnosis.SlowedDown, slow)
	}
	if diagnosis.Suspected.String() != names.LevelSuspected || diagnosis.Confirmed.String() != names.LevelConfirmed {
		t.Error("diagnosis and names differ in levels")
	}
}

// constants returns the values of this package's string constants whose names
// begin with prefix.
func constants(t *testing.T, prefix string) []string {
	t.Helper()
	var values []string
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, name := range spec.Names {
				if !strings.HasPrefix(name.Name, prefix) || i >= len(spec.Values) {
					continue
				}
				if lit, ok := spec.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					v, err := strconv.Unquote(lit.Value)
					if err != nil {
						t.Fatal(err)
					}
					values = append(values, v)
				}
			}
			return true
		})
	}
	if len(values) == 0 {
		t.Fatalf("no constants with prefix %s", prefix)
	}
	return values
}

// TestTransports: the reference names each transport that a span may say.
func TestTransports(t *testing.T) {
	i := slices.IndexFunc(names.Attributes(), func(a names.Attribute) bool { return a.Key == names.AttrTransport })
	for k := record.TransportNone + 1; k.Known(); k++ {
		if help := names.Attributes()[i].Help; !strings.Contains(help, k.String()) {
			t.Errorf("%s: %q does not name %v", names.AttrTransport, help, k)
		}
	}
}
