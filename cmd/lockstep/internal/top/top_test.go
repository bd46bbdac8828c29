package top

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/record"
)

// ranks makes the recorders of some ranks of a world of four, all of this process: the
// first two are in AllReduce 8 of dp, the third has not entered it.
func ranks(t *testing.T, n int, job string) string {
	t.Helper()
	dir := t.TempDir()
	for rank := range n {
		w, err := record.Create(record.Options{Dir: dir, RingSlots: 16, CommSlots: 2, ConnSlots: 2, Identity: record.Identity{Job: job, Node: "n0", Rank: int32(rank), WorldSize: 4}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		c, _ := w.AddComm(record.CommEntry{ID: 0xd0, Name: "dp", Rank: int32(rank), Size: 4, State: record.CommJoined})
		now := record.Now()
		if rank < 2 {
			c.Enqueued(8, now-5e9, record.AllReduce, 1000)
			c.Started(8, now-5e9)
			c.Finished(7, now-6e9)
			continue
		}
		c.Enqueued(7, now-7e9, record.AllReduce, 1000)
		c.Started(7, now-7e9)
		c.Finished(7, now-6e9)
	}
	return dir
}

func TestNode(t *testing.T) {
	dir := ranks(t, 3, "llm")
	var out bytes.Buffer
	if err := (&Cmd{RuntimeDir: dir, Sort: "state"}).Run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"llm  step 0  attempt 0  4 ranks", "STATE    N  RANKS  FOR", "AllReduce #8 on dp  rank 2\n", "awaited  1  2"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Error("escape sequences where there is no terminal")
	}
	out.Reset()
	if err := (&Cmd{RuntimeDir: dir, Sort: "time", Ranks: true, Once: true}).Run(t.Context(), &out); err != nil || strings.Count(out.String(), "on dp (its rank") != 2 || strings.Count(out.String(), "\n") != 5 {
		t.Errorf("%v:\n%s", err, &out)
	}
	out.Reset()
	var views []View
	if err := (&Cmd{RuntimeDir: dir, Sort: "rank", JSON: true}).Run(t.Context(), &out); err != nil || json.Unmarshal(out.Bytes(), &views) != nil {
		t.Fatalf("%v:\n%s", err, &out)
	}
	if len(views) != 1 || len(views[0].Ranks) != 3 || views[0].Ranks[0].State != "held" || len(views[0].Ranks[0].WaitsFor) != 1 || views[0].Ranks[0].WaitsFor[0] != 2 || views[0].Ranks[2].State != "awaited" {
		t.Errorf("%+v", views)
	}
}

// Ranks of other nodes may have entered or not: nobody is said to wait for them.
func TestNodeKnowsItsOwnRanksOnly(t *testing.T) {
	views, err := (&Cmd{RuntimeDir: ranks(t, 2, "llm"), Sort: "rank"}).recorders(t.Context())
	if err != nil || len(views[0].Ranks) != 2 || views[0].Ranks[0].State != "held" || views[0].Ranks[0].Waited != 0 {
		t.Errorf("%v %+v", err, views)
	}
	if _, err := (&Cmd{RuntimeDir: t.TempDir()}).recorders(t.Context()); err == nil || !strings.Contains(err.Error(), "LOCKSTEP_RUNTIME_DIR") {
		t.Errorf("no ranks: %v", err)
	}
	if _, err := (&Cmd{RuntimeDir: t.TempDir() + "/nowhere"}).recorders(t.Context()); err == nil {
		t.Error("no directory: no error")
	}
}

func TestMasterIsAsked(t *testing.T) {
	at := time.Now()
	h := http.NewServeMux()
	h.HandleFunc("GET /api/v1/status", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(web.Status{Job: "llm\x1b[2J", At: at, Health: "confirmed", WorldSize: 4, Step: 7, Open: []web.Incident{{
			Level: "confirmed", Class: "noncommunication_hang", Since: at.Add(-3 * time.Second), Culprits: []web.Culprit{{Name: "rank 2", Node: "n1", Reason: "process_stopped"}}, Evidence: []string{"one\nline"},
		}}})
	})
	h.HandleFunc("GET /api/v1/ranks", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(web.Standings{Ranks: []web.Standing{{Rank: 0, State: "moving"}, {Rank: 2, State: "stopped", Culprit: true, Node: "n1", Seconds: 61}}})
	})
	srv := httptest.NewServer(h)
	defer srv.Close()
	var out bytes.Buffer
	c := &Cmd{Master: strings.TrimPrefix(srv.URL, "http://"), Sort: "state", Ranks: true}
	if err := c.Run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"llm·[2J  step 7", "confirmed noncommunication_hang: rank 2 on n1 (process_stopped), for 3.0 s", "one·line", "2     n1         stopped (blamed)  1 min 1 s"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	for at, want := range map[string]string{"ftp://x": "--master", srv.URL + "/elsewhere": "404"} {
		if err := (&Cmd{Master: at, Once: true}).Run(t.Context(), &out); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", at, err)
		}
	}
}

func TestFrameFits(t *testing.T) {
	s := &screen{paper: paper{color: true, width: 20, height: 3}}
	s.line("%s", s.tone("confirmed", "red"+strings.Repeat("é", 40)))
	for i := range 9 {
		s.line("line %d", i)
	}
	lines := strings.Split(s.frame(), "\r\n")
	if len(lines) != 3 || !strings.Contains(lines[2], "… 8 more lines") {
		t.Errorf("%q", lines)
	}
	if n := strings.Count(lines[0], "é"); n != 17 || !strings.Contains(lines[0], "\x1b[0m") {
		t.Errorf("%d: %q", n, lines[0])
	}
}

func TestOrder(t *testing.T) {
	list := []web.Standing{{Rank: 0, State: "moving", Node: "b"}, {Rank: 1, State: "held", Node: "a", Seconds: 2}, {Rank: 2, State: "gone", Node: "a", Seconds: 1}}
	for sort, want := range map[string]string{"state": "[2 1 0]", "rank": "[0 1 2]", "node": "[1 2 0]", "time": "[1 2 0]"} {
		v := []View{{Ranks: append([]web.Standing(nil), list...)}}
		(&Cmd{Sort: sort}).order(v)
		var got []int
		for _, r := range v[0].Ranks {
			got = append(got, r.Rank)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%s: %v, want %s", sort, got, want)
		}
	}
}
