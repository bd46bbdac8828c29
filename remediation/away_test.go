package remediation

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func soon(o *Options) { o.Retry = time.Millisecond }

// A master that was killed is asked until it is back, however long that takes; what waits for it is not lost.
func TestAMasterThatIsAwayForLong(t *testing.T) {
	w := &word{says: map[string]Incident{"i": hang(5, 0)}, fails: 4}
	g := startWith(t, "", live(), &fake{masters: w}, soon)
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeDone || g.act.count() != 1 {
		t.Errorf("%+v", e)
	}
}

// A job whose master is away takes no turn from the others, and when its alert is stale a person is told.
func TestAMasterThatDoesNotComeBack(t *testing.T) {
	w := &word{says: map[string]Incident{"i": hang(5, 0)}, fails: 1 << 30}
	cfg := live()
	cfg.MaxAge = 3 * time.Second
	g := startWith(t, "", cfg, &fake{masters: w}, soon)
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeFailed || e.Detail == "" || g.act.count() != 0 {
		t.Errorf("%+v", e)
	}
	if n := g.r.postponed(1); n != 0 {
		t.Errorf("%d turns of a closed entry are remembered", n)
	}
}

// Calls that nobody answers use up no tries: an API server that is away for long costs no action.
func TestNobodyAnswersTheActuator(t *testing.T) {
	away := fmt.Errorf("get job: %w: connection refused", ErrAway)
	g := startWith(t, "", live(), &fake{fail: 3 * maxTries, err: away}, soon)
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeDone || e.Tries != 3*maxTries+1 || e.Unanswered != 3*maxTries || g.act.count() != 1 {
		t.Errorf("%+v", e)
	}
	g.stop()
	g = startWith(t, "", live(), &fake{fail: 3 * maxTries, err: errors.New("it answers, and cannot")}, soon)
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeFailed || e.Tries != maxTries || !strings.Contains(e.Detail, "cannot") {
		t.Errorf("%+v", e)
	}
}

// While the actuator's inventory cannot be asked, nobody knows what to take out: the decision waits, and is
// not made for the smaller step.
func TestWhatToTakeOutIsAskedAgain(t *testing.T) {
	slow := hang(3, 0)
	slow.Class = "noncommunication_slow"
	act := &fake{masters: &word{says: map[string]Incident{"i": slow}}, silent: 7}
	g := startWith(t, "", live(), act, soon)
	g.send(alert("i"))
	if e := g.closed(); e.Outcome != OutcomeDone || e.Kind != ActionExclude || e.Unit != "slot3" {
		t.Errorf("%+v", e)
	}
}
