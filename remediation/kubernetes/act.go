package kubernetes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation"
)

type gvr = schema.GroupVersionResource

// AnnotationActions on a job's owner holds the last actions on it, as JSON, oldest first.
const AnnotationActions = "lockstep.dev/actions"

const (
	maxRecords   = 8
	maxConflicts = 8 // times that a change is tried again since somebody else came between
)

// record is one action, as it stands on the job's owner. It is written before anything is done.
type record struct {
	Version  int       `json:"v"`
	ID       string    `json:"id"`
	Kind     string    `json:"kind"`
	Incident string    `json:"incident"`
	Reason   string    `json:"reason,omitempty"`
	By       string    `json:"by"`
	Begun    time.Time `json:"begun"`
	Step     step      `json:"step"`
	Attempt  int       `json:"attempt"`        // that it ends, as the ranks count
	From     int       `json:"from"`           // the owner's count before, -1: it has none
	To       int       `json:"to"`             // and after
	Old      []string  `json:"old,omitempty"`  // UIDs of the pods that it ends, where nothing counts
	Node     string    `json:"node,omitempty"` // taken out
	Why      string    `json:"why,omitempty"`  // suspect, silent
	Spare    string    `json:"spare,omitempty"`
	Notes    []string  `json:"notes,omitempty"`
	Ran      time.Time `json:"ran,omitzero"` // when the job ran again

	looks int             // of this process, at pods that do not start or end
	waits map[string]bool // nodes that it has told to wait for proof about
}

type step string

const (
	stepBegun     step = "begun"
	stepSuspended step = "suspended"
	stepRestarted step = "restarted" // its pods are the controllers' business now
	stepDone      step = "done"
)

func (r *record) old(uid string) bool { return slices.Contains(r.Old, uid) }

// note adds what a person should know, once.
func (r *record) note(format string, args ...any) {
	if s := fmt.Sprintf(format, args...); len(r.Notes) < 8 && !slices.Contains(r.Notes, s) {
		r.Notes = append(r.Notes, s)
	}
}

func (r *record) answer() remediation.Answer {
	return remediation.Answer{At: r.Ran, Detail: strings.Join(r.Notes, "; ")}
}

// errAnnotation says that somebody has written what is not this package's.
var errAnnotation = errors.New("annotation " + AnnotationActions + " cannot be read: remove it when no action is in flight")

func records(o *unstructured.Unstructured) ([]*record, error) {
	text := o.GetAnnotations()[AnnotationActions]
	if text == "" {
		return nil, nil
	}
	var list []*record
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("%w: %w", errAnnotation, err)
	}
	for _, r := range list {
		if r == nil || r.Version != 1 || r.ID == "" {
			return nil, errAnnotation
		}
	}
	return list, nil
}

// with is the annotation with r in it.
func with(list []*record, r *record) string {
	i := slices.IndexFunc(list, func(o *record) bool { return o.ID == r.ID })
	if i < 0 {
		i, list = len(list), append(list, r)
	}
	list[i] = r
	list = list[max(0, len(list)-maxRecords):]
	b, err := json.Marshal(list)
	if err != nil {
		panic(err) // strings, numbers and times
	}
	return string(b)
}

// Act implements remediation.Actuator. It returns when every pod of the new attempt
// runs, or ctx ends.
func (a *Actuator) Act(ctx context.Context, act remediation.Action) (remediation.Answer, error) {
	answer, err := a.act(ctx, act)
	return answer, away(ctx, err)
}

func (a *Actuator) act(ctx context.Context, act remediation.Action) (remediation.Answer, error) {
	if !a.leading.Load() {
		return remediation.Answer{}, errors.New("kubernetes: another remediator leads")
	}
	if act.Kind != remediation.ActionRestart && act.Kind != remediation.ActionExclude {
		return remediation.Answer{}, fmt.Errorf("kubernetes actuator cannot %q", act.Kind)
	}
	j, r, over, err := a.begin(ctx, act)
	if err != nil {
		return remediation.Answer{}, err
	}
	if over != "" {
		return remediation.Answer{Detail: over}, nil
	}
	if r.Step == stepDone {
		answer := r.answer()
		answer.Detail += " (answered again)"
		return answer, nil
	}
	if r.Step == stepBegun {
		if err := a.prepare(ctx, j, r); err != nil {
			return remediation.Answer{}, err
		}
		if err := a.restart(ctx, j, r); err != nil {
			return remediation.Answer{}, err
		}
	}
	if err := a.follow(ctx, j, r); err != nil {
		return remediation.Answer{}, err
	}
	return r.answer(), nil
}

// begin finds the action's record, or decides and writes it. over says why nothing is to be done.
func (a *Actuator) begin(ctx context.Context, act remediation.Action) (j *job, r *record, over string, err error) {
	for range maxConflicts {
		if j, err = a.find(ctx, act.Job); err != nil {
			return nil, nil, "", err
		}
		list, err := records(j.owner)
		if err != nil {
			return nil, nil, "", fmt.Errorf("kubernetes: %s: %w", j, err)
		}
		if i := slices.IndexFunc(list, func(r *record) bool { return r.ID == act.ID }); i >= 0 {
			return j, list[i], "", nil
		}
		if r, over, err = a.plan(ctx, j, act); err != nil || over != "" {
			return nil, nil, over, err
		}
		err = a.save(ctx, j, r, nil)
		if err == nil {
			a.event(ctx, j.owner, r.ID, "LockstepAction", warning, fmt.Sprintf("%s for incident %s: %s", r.Kind, r.Incident, r.Reason))
			return j, r, "", nil
		}
		if !apierrors.IsConflict(err) {
			return nil, nil, "", fmt.Errorf("kubernetes: write the action onto %s: %w", j, err)
		}
	}
	return nil, nil, "", fmt.Errorf("kubernetes: job %s changes faster than an action can be written onto it", act.Job)
}

// plan decides what an action means for the job as it is.
func (a *Actuator) plan(ctx context.Context, j *job, act remediation.Action) (*record, string, error) {
	if j.kind.suspended(j.owner) {
		return nil, fmt.Sprintf("nothing done: %s is suspended, by somebody else", j), nil
	}
	running := j.attempt()
	if act.Attempt != nil && running >= 0 && running != *act.Attempt {
		return nil, fmt.Sprintf("nothing done: the decision was about attempt %d, attempt %d runs", *act.Attempt, running), nil
	}
	if why := j.remade(act); why != "" {
		return nil, "nothing done: " + why, nil
	}
	if len(j.pods) == 0 {
		return nil, "", fmt.Errorf("kubernetes: %s has no pods now: it is being restarted, or waits to start: %w", j, remediation.ErrAway)
	}
	from := j.kind.attempt(j.owner)
	if newest := j.newest(); from >= 0 && (running >= 0 && running < from || newest >= 0 && newest < from) {
		return nil, fmt.Sprintf("nothing done: %s is restarting already, to attempt %d", j, from), nil
	}
	r := &record{
		Version: 1, ID: act.ID, Kind: string(act.Kind), Incident: act.Incident, Reason: act.Reason, By: a.o.Identity,
		Begun: a.o.now().UTC(), Step: stepBegun, Attempt: max(running, 0), From: from, To: from + 1,
	}
	if act.Attempt != nil {
		r.Attempt = *act.Attempt
	}
	if j.kind.restarts == nil {
		for _, p := range j.pods {
			if !p.ended {
				r.Old = append(r.Old, p.uid)
			}
		}
	}
	if err := a.planNode(ctx, j, act, r); err != nil {
		return nil, "", err
	}
	return r, "", nil
}

// planNode decides which node is taken out: the culprit's when the action says so, and one
// that is silent, since the scheduler would go on using it until Kubernetes notices.
func (a *Actuator) planNode(ctx context.Context, j *job, act remediation.Action, r *record) error {
	if act.Kind == remediation.ActionExclude {
		p, why := j.culprit(act.Rank, act.Node)
		switch {
		case p == nil:
			r.note("no node is taken out: %s", why)
		case act.Unit != "" && act.Unit != p.node:
			r.note("no node is taken out: the decision was about %s, and the rank is on %s now", act.Unit, p.node)
		default:
			r.Node, r.Why = p.node, whySuspect
		}
		return nil
	}
	if act.Node == "" || act.Cause != names.ReasonNodeLost || !slices.Contains(j.nodes(), act.Node) {
		return nil
	}
	silent, _, err := a.listen(ctx, act.Node)
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	if silent != "" {
		r.Node, r.Why = act.Node, whySilent
		r.note("node %s: %s", act.Node, silent)
	}
	return nil
}

// prepare takes the node out and a spare in. What cannot be done is noted; the job is
// restarted all the same.
func (a *Actuator) prepare(ctx context.Context, j *job, r *record) error {
	if r.Node == "" {
		return nil
	}
	pool, err := a.poolOf(ctx, r.Node)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("kubernetes: %w", err)
	}
	if err == nil && pool.name != "" {
		if r.Spare, err = a.takeSpare(ctx, pool.name, used{Action: r.ID, Job: j.namespace() + "/" + j.name, For: r.Node}); err != nil {
			return fmt.Errorf("kubernetes: spare of pool %s: %w", pool.name, err)
		}
		switch {
		case r.Spare != "":
			r.note("spare %s of pool %s", r.Spare, pool.name)
		case r.Why == whySuspect && a.o.WhenEmpty != EmptyWaits:
			r.note("pool %s has no spare: restarted in place, node %s stays in", pool.name, r.Node)
			a.event(ctx, j.owner, r.ID, "LockstepPoolEmpty", warning, r.Notes[len(r.Notes)-1])
			r.Node, r.Why = "", ""
			return nil
		default:
			r.note("pool %s has no spare: the job waits for a node", pool.name)
			a.event(ctx, j.owner, r.ID, "LockstepPoolEmpty", warning, r.Notes[len(r.Notes)-1])
		}
	}
	switch why, err := a.takeOut(ctx, r.Node, note{
		Action: r.ID, Incident: r.Incident, Job: j.namespace() + "/" + j.name, Why: r.Why, Reason: r.Reason, Spare: r.Spare,
	}); {
	case err != nil:
		return fmt.Errorf("kubernetes: take node %s out: %w", r.Node, err)
	case why != "":
		r.note("node %s is not taken out: %s", r.Node, why)
		if r.Spare != "" {
			if err := a.returnSpare(ctx, r.Spare); err != nil {
				return fmt.Errorf("kubernetes: return spare %s: %w", r.Spare, err)
			}
			r.Spare = ""
		}
		r.Node, r.Why = "", ""
	default:
		r.note("node %s is out (%s)", r.Node, r.Why)
	}
	return nil
}

// restart makes the owner start anew, exactly once.
func (a *Actuator) restart(ctx context.Context, j *job, r *record) error {
	for range maxConflicts {
		var err error
		if j.kind.restarts == nil {
			r.Step = stepSuspended
			err = a.save(ctx, j, r, patchOf(j.owner, true, j.kind.suspend...))
		} else {
			err = a.raise(ctx, j, r)
		}
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) {
			return fmt.Errorf("kubernetes: restart %s: %w", j, err)
		}
		if err := a.reread(ctx, j, r); err != nil {
			return err
		}
		if r.Step != stepBegun {
			return nil
		}
	}
	return fmt.Errorf("kubernetes: restart %s: others change it all the time", j)
}

// raise counts the owner's attempts up, from the one that the record says. The count
// is the proof: a repeat finds it raised.
func (a *Actuator) raise(ctx context.Context, j *job, r *record) error {
	if j.kind.attempt(j.owner) < r.To {
		body, err := json.Marshal(patchOf(j.owner, r.To, j.kind.restarts...))
		if err != nil {
			return err
		}
		o, err := a.resource(j.kind.gvr, j.namespace()).Patch(ctx, j.owner.GetName(), types.MergePatchType, body, metav1.PatchOptions{FieldManager: manager}, "status")
		a.m.called("patch", err)
		if err != nil {
			return err
		}
		j.owner = o
	}
	r.Step = stepRestarted
	return a.save(ctx, j, r, nil)
}

// save writes the record, in one change with what else the patch holds.
func (a *Actuator) save(ctx context.Context, j *job, r *record, patch map[string]any) error {
	list, err := records(j.owner)
	if err != nil {
		return err
	}
	if patch == nil {
		patch = patchOf(j.owner, j.owner.GetResourceVersion(), "metadata", "resourceVersion")
	}
	patch["metadata"].(map[string]any)["annotations"] = map[string]any{AnnotationActions: with(list, r)}
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	o, err := a.resource(j.kind.gvr, j.namespace()).Patch(ctx, j.owner.GetName(), types.MergePatchType, body, metav1.PatchOptions{FieldManager: manager})
	a.m.called("patch", err)
	if err != nil {
		return err
	}
	j.owner = o
	return nil
}

// reread takes the job and the record as they are now; what was noted meanwhile is kept.
func (a *Actuator) reread(ctx context.Context, j *job, r *record) error {
	if err := a.again(ctx, j); err != nil {
		return err
	}
	list, err := records(j.owner)
	if err != nil {
		return fmt.Errorf("kubernetes: %s: %w", j, err)
	}
	i := slices.IndexFunc(list, func(o *record) bool { return o.ID == r.ID })
	if i < 0 {
		return fmt.Errorf("kubernetes: %s: somebody has removed the record of action %s (annotation %s)", j, r.ID, AnnotationActions)
	}
	r.Step = list[i].Step
	return nil
}

// follow sees the new attempt running, and removes what keeps it from that.
func (a *Actuator) follow(ctx context.Context, j *job, r *record) error {
	blocked := ""
	for {
		err := a.again(ctx, j)
		switch {
		case errors.Is(err, remediation.ErrGone):
			return err
		case err != nil && ctx.Err() == nil:
			a.o.Logger.Warn("an action in flight cannot see its job, asking again", "job", j.name, "action", r.ID, "err", err)
		case err == nil:
			if why := j.kind.over(j.owner); why != "" {
				return fmt.Errorf("%w: %s %s", remediation.ErrGone, j, why)
			}
			done, waits, err := a.look(ctx, j, r)
			switch {
			case done:
				return nil
			case err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil:
				blocked = err.Error()
			case err == nil:
				blocked = waits
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kubernetes: %s does not run again yet: %s: %w", j, cmp.Or(blocked, "its owner has not answered"), ctx.Err())
		case <-time.After(a.o.Poll):
		}
	}
}

// look is one round of follow. blocked says what the job waits for.
func (a *Actuator) look(ctx context.Context, j *job, r *record) (done bool, blocked string, err error) {
	stale, fresh := j.stale(r), j.fresh(r)
	if r.Step == stepSuspended && len(stale) == 0 {
		if c := j.completed(); c != "" {
			r.note("indexes %s count as completed and are not started again: a rank must not answer SIGTERM with exit status 0", c)
		}
		r.Step = stepRestarted
		if err := a.save(ctx, j, r, patchOf(j.owner, false, j.kind.suspend...)); err != nil {
			r.Step = stepSuspended
			return false, "", fmt.Errorf("resume: %w", err)
		}
		a.o.Logger.Info("the last pod of the old attempt is gone, resumed", "job", j.name, "action", r.ID)
		return false, "its pods are being made", nil
	}
	want, err := j.kind.want(j.owner)
	if err != nil {
		return false, "", err
	}
	running := 0
	for _, p := range fresh {
		if p.running {
			running++
		}
	}
	if running >= want && want > 0 && r.Step == stepRestarted {
		r.Step, r.Ran, r.Old = stepDone, a.o.now().UTC(), nil
		if r.To > 0 {
			r.note("attempt %d runs: %d pods", r.To, running)
		} else {
			r.note("runs again: %d pods", running)
		}
		if err := a.save(ctx, j, r, nil); err != nil {
			r.Step = stepRestarted
			r.Notes = r.Notes[:len(r.Notes)-1]
			return false, "", fmt.Errorf("write down that it runs: %w", err)
		}
		a.event(ctx, j.owner, r.ID, "LockstepRestarted", normal, strings.Join(r.Notes, "; "))
		return true, "", nil
	}
	blocked = fmt.Sprintf("%d of %d pods run", running, want)
	why, err := a.unblock(ctx, j, r, stale, fresh)
	if err != nil {
		return false, "", err
	}
	if why != "" {
		return false, blocked + ": " + why, nil
	}
	for _, p := range fresh {
		if !p.running && p.waits != "" {
			return false, fmt.Sprintf("%s: pod %s: %s", blocked, p.name, p.waits), nil
		}
	}
	return false, blocked, nil
}
