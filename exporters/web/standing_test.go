package web_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/record"
)

// hung is a job of n ranks in which all but one are in AllReduce 977 of dp for four seconds.
func hung(n, culprit int) *collector.JobView {
	v := &collector.JobView{At: time.Now(), Ranks: make([]collector.RankView, n)}
	world := make([]int32, n)
	for i := range v.Ranks {
		world[i] = int32(i)
		r := &v.Ranks[i]
		*r = collector.RankView{Node: fmt.Sprintf("gpu-%02d", i/8), PID: int32(4000 + i), Proc: diagnosis.ProcRunning, Seen: true, Step: 4211}
		if i == culprit {
			r.Proc, r.ProcAt = diagnosis.ProcStopped, v.At.Add(-5*time.Second)
			continue
		}
		r.In = &collector.Stay{Comm: "dp", CommRank: i, Coll: record.AllReduce, Seq: 977, Since: v.At.Add(-4 * time.Second), WaitsFor: []int32{int32(culprit)}, Waited: 1}
	}
	v.Comms = []collector.CommView{{ID: 7, Name: "dp", World: world, Open: n - 1, Oldest: v.At.Add(-4 * time.Second), Least: 976, Most: 976}}
	return v
}

func TestRanksAreTold(t *testing.T) {
	view := hung(8, 5)
	fetch := start(t, web.Options{Status: snapshot, Job: func() *collector.JobView { return view }})
	_, body := fetch("/status")
	for _, want := range []string{
		`<li class="stopped culprit"><b class="state">stopped</b> <b class="tag">blamed</b>`, "<b>0-1, 3-4, 7</b> · in AllReduce #977 on dp · for 4.0 s · waits for <b>rank 5</b>",
		`aria-label="1 stopped, 7 held"`, `title="rank 5: stopped for 5.0 s, blamed">5</i>`, `<th scope="row">dp</th><td>8</td><td>0-7</td>`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("page lacks %s", want)
		}
	}
	if strings.Index(body, `class="stopped culprit"`) > strings.Index(body, `class="held`) {
		t.Error("who is blamed does not come first")
	}
	var got web.Standings
	if _, body := fetch("/api/v1/ranks"); json.Unmarshal([]byte(body), &got) != nil || len(got.Ranks) != 8 || got.Ranks[5].State != "stopped" || !got.Ranks[5].Culprit || got.Ranks[0].WaitsFor[0] != 5 {
		t.Errorf("ranks: %s", body)
	}
	// The same ranks without the incident and in motion are all alike.
	for i := range view.Ranks {
		view.Ranks[i].Proc = diagnosis.ProcRunning
		if in := view.Ranks[i].In; in != nil {
			in.Since = view.At.Add(-time.Duration(i) * time.Millisecond)
		}
	}
	view.Comms[0].Oldest = view.At.Add(-time.Millisecond)
	healthy := snapshot()
	healthy.Incidents = nil
	fetch = start(t, web.Options{Status: func() *collector.MasterSnapshot { return healthy }, Job: func() *collector.JobView { return view }})
	var st web.Status
	if _, body := fetch("/api/v1/status"); json.Unmarshal([]byte(body), &st) != nil || len(st.Situations) != 1 || st.Situations[0].State != "moving" || st.Situations[0].Who != "0-7" {
		t.Errorf("moving ranks: %+v", st.Situations)
	}
}

// Ranks that have made no communicator so far are starting, and neither moving nor held.
func TestStartingRanksAreTold(t *testing.T) {
	view := &collector.JobView{At: time.Now(), Ranks: make([]collector.RankView, 4)}
	for i := range view.Ranks {
		view.Ranks[i] = collector.RankView{Node: "gpu-00", PID: int32(4000 + i), Proc: diagnosis.ProcRunning, ProcAt: view.At.Add(-4 * time.Second), Seen: true, Starting: true, WaitsIn: diagnosis.WaitInNetwork}
	}
	view.Ranks[2].WaitsIn = diagnosis.WaitInSleep
	view.Ranks[3].Proc = diagnosis.ProcStopped
	status := snapshot()
	status.Incidents = nil
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot { return status }, Job: func() *collector.JobView { return view }})
	_, body := fetch("/status")
	for _, want := range []string{
		`<b>0-1</b> · in the network (a socket or a poll) · for 4.0 s`, `<b>2</b> · in a sleep of its own · for 4.0 s`,
		`aria-label="1 stopped, 3 starting"`, `class="starting" title="rank 2: starting for 4.0 s, waits in a sleep of its own">2</i>`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("page lacks %s", want)
		}
	}
	var got web.Standings
	if _, body := fetch("/api/v1/ranks"); json.Unmarshal([]byte(body), &got) != nil || len(got.Ranks) != 4 || got.Ranks[0].State != web.StandingStarting || got.Ranks[2].WaitsIn != "a sleep of its own" || got.Ranks[3].State != "stopped" {
		t.Errorf("ranks: %s", body)
	}
	view.Ranks[0].Starting = false // it has made one
	if list := web.Stand(view, nil); list[0].State != web.StandingMoving {
		t.Errorf("%+v", list[0])
	}
}

// Names come from jobs: none of them may become markup.
func TestRanksAreEscaped(t *testing.T) {
	const evil = `"><script>alert(1)</script>`
	view := hung(8, 5)
	view.Comms[0].Name = evil
	for i := range view.Ranks {
		view.Ranks[i].Node = evil
		if in := view.Ranks[i].In; in != nil {
			in.Comm = evil
		}
	}
	s := snapshot()
	s.Incidents[0].Notes = []collector.Note{{At: s.At, Kind: evil, Text: evil}}
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot { return s }, Job: func() *collector.JobView { return view }, Links: web.Links{Grafana: "javascript:alert(1)//", Trace: "javascript:alert(1)//{trace}"}})
	_, body := fetch("/status")
	if strings.Contains(body, "<script>alert") || strings.Contains(body, `href="javascript:`) || strings.Count(body, "&lt;script&gt;") < 12 {
		t.Errorf("not escaped:\n%s", body)
	}
}

// A world of any size makes a page of bounded size: thousands of ranks cost a few bytes each,
// and beyond what can be drawn only those that do not move are.
func TestPageIsBounded(t *testing.T) {
	for _, n := range []int{4096, 100_000} {
		view := hung(n, 77)
		for i := n / 2; i < n; i++ {
			view.Ranks[i].In = nil
		}
		for i := range 100 { // and each of some for another one
			view.Ranks[i*8].In = &collector.Stay{Comm: fmt.Sprint("tp", i), Coll: record.AllGather, Seq: 5, Since: view.At.Add(-3 * time.Second), WaitsFor: []int32{1, 2, 3, 4}, Waited: 7}
		}
		fetch := start(t, web.Options{Status: snapshot, Job: func() *collector.JobView { return view }})
		_, body := fetch("/status")
		if len(body) > 2<<20 || !strings.Contains(body, "other situations") {
			t.Errorf("%d ranks: a page of %d bytes", n, len(body))
		}
		t.Logf("%d ranks: %d bytes, %d cells", n, len(body), strings.Count(body, "<i class"))
	}
}

func BenchmarkPage4096(b *testing.B) {
	view, s := hung(4096, 77), snapshot()
	page := web.Page(func() *collector.MasterSnapshot { return s }, func() *collector.JobView { return view })
	for range b.N {
		page()
	}
}

func TestTimelineAndLinks(t *testing.T) {
	s := snapshot()
	in := &s.Incidents[1]
	in.Notes = []collector.Note{
		{At: in.Confirmed.Add(2 * time.Second), Kind: collector.NoteAction, Text: "restart: done"},
		{At: in.Confirmed.Add(time.Second), Kind: collector.NoteWebhook, Text: "entry 1 of the remediator's journal"},
	}
	fetch := start(t, web.Options{Status: func() *collector.MasterSnapshot { return s }, Links: web.Links{Grafana: "https://grafana.example/", Trace: "https://jaeger.example/trace/{trace}"}})
	_, body := fetch("/api/v1/status")
	var got web.Status
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, e := range got.Open[0].Timeline {
		kinds = append(kinds, e.Kind)
	}
	if strings.Join(kinds, " ") != "onset suspected confirmed webhook action" {
		t.Errorf("timeline %v", kinds)
	}
	if o := &got.Open[0]; o.Trace != "https://jaeger.example/trace/ab000000000000000000000000000000" || !strings.HasPrefix(o.Dashboard, "https://grafana.example/d/lockstep-job?from=") {
		t.Errorf("links %+v", o)
	}
	for _, in := range append(got.Open, got.Closed...) {
		if resp, body := fetch("/" + in.Runbook); resp.StatusCode != 200 || !strings.Contains(body, strings.TrimPrefix(in.Runbook, "runbooks/")) {
			t.Errorf("%s: %d", in.Runbook, resp.StatusCode)
		}
	}
	for _, path := range []string{"/runbooks/nothing", "/runbooks/..%2fdocs.go"} {
		if resp, _ := fetch(path); resp.StatusCode != 404 {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
}
