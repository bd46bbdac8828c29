package web

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/docs/runbooks"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Links say where the status page finds what others show. What is "" is left out.
type Links struct {
	Grafana string // base URL, without the /d/ of dashboards
	Trace   string // URL of a trace, with {trace} for its id
}

// margin is what a dashboard shows around an incident.
const margin = 5 * time.Minute

// of sets an incident's links.
func (l Links) of(job string, in *Incident, now time.Time) {
	in.Runbook = "runbooks/" + runbook(in)
	if l.Grafana != "" {
		to := now
		if in.Closed != nil {
			to = in.Closed.Add(margin)
		}
		q := url.Values{
			"var-" + names.LabelJob: {job},
			"from":                  {strconv.FormatInt(in.Since.Add(-margin).UnixMilli(), 10)},
			"to":                    {strconv.FormatInt(to.UnixMilli(), 10)},
		}
		in.Dashboard = strings.TrimSuffix(l.Grafana, "/") + "/d/" + names.DashboardJob + "?" + q.Encode()
	}
	if l.Trace != "" && in.TraceID != "" {
		in.Trace = strings.ReplaceAll(l.Trace, "{trace}", in.TraceID)
	}
}

// runbook is the page about an incident.
func runbook(in *Incident) string {
	if alert, ok := names.VerdictAlerts[in.Class]; ok && in.Level != names.LevelSuspected {
		return alert
	}
	return names.AlertFaultSuspected
}

// runbookPage serves the runbooks that this program was built with: at three in the morning
// a page that needs nothing else is worth more than a newer one elsewhere.
func runbookPage(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	text, err := runbooks.Pages.ReadFile(strings.TrimSuffix(name, ".md") + ".md")
	if err != nil {
		http.Error(w, "there is no runbook of that name", http.StatusNotFound)
		return
	}
	secure(w, "text/html; charset=utf-8")
	_ = pages.ExecuteTemplate(w, "runbook", struct{ Name, Text string }{name, string(text)}) // an error here is a reader that left
}
