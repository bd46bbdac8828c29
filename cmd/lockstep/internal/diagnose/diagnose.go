// Package diagnose is `lockstep diagnose`: an incident judged again, offline,
// from the evidence that its master recorded.
//
// In flows one recording; out flow the verdicts of this program's engine over time,
// beside those that were told then, as text or JSON, and on request the evidence on
// which each of them rests. It reads nothing else, and judges nothing itself.
package diagnose

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// Exit statuses beside 0.
const (
	StatusDiffers = 1
	StatusError   = 2
)

// Error is an error with the exit status that it asks for.
type Error struct {
	Status int
	Err    error // nil: all was said already
}

func (e *Error) Error() string {
	if e.Err == nil {
		return ""
	}
	return e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// ExitStatus is the command's.
func (e *Error) ExitStatus() int { return e.Status }

// Cmd is the command line.
type Cmd struct {
	Replay  string            `required:"" type:"path" placeholder:"FILE" help:"Recording to judge: of an incident (DIR/incidents/ID.evidence of the master's --state-dir DIR), or the rolling one, a segment or its directory (DIR/recording)."`
	Explain bool              `short:"e" help:"Show why: the sentences, and the evidence of whom a verdict blames at that moment."`
	JSON    bool              `name:"json" help:"Write JSON: one object with all events."`
	From    string            `placeholder:"T" help:"Tell and compare what happens from then on: a duration since the recording's first pass (12s), or a time (2006-01-02T15:04:05Z, 15:04:05)."`
	To      string            `placeholder:"T" help:"And until then."`
	Config  map[string]string `placeholder:"NAME=VALUE" help:"Judge with another threshold than the master had, by its name in the recording (confirm-after=3s). Repeatable; a wrong name lists them."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Gives an engine of this program the evidence that a master recorded, pass by pass, and tells what it
finds and when, beside what the master told then. Nothing is contacted: a copy of the file is enough.

Examples:
  lockstep diagnose --replay /var/lib/lockstep/llm/incidents/llm-1700000000000-1.evidence
  lockstep diagnose --replay FILE --explain               what each verdict rests on
  lockstep diagnose --replay FILE --from 60s --to 90s     a part; all before it is judged, too
  lockstep diagnose --replay FILE --config confirm-after=5s --config duration-factor=2
  lockstep diagnose --replay FILE --json | jq '.events[].verdict.culprits'

Exit status: 0 when the verdicts are those that were recorded, 1 when they differ, 2 on an error.`
}

// Run replays c.Replay.
func (c *Cmd) Run(ctx context.Context, _ *slog.Logger, out io.Writer) error {
	same, err := c.run(ctx, out)
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case err != nil:
		return &Error{StatusError, fmt.Errorf("diagnose %s: %w", c.Replay, err)}
	case !same:
		return &Error{Status: StatusDiffers}
	}
	return nil
}

func (c *Cmd) run(ctx context.Context, out io.Writer) (same bool, err error) {
	config, err := overrides(c.Config)
	if err != nil {
		return false, err
	}
	file, err := open(c.Replay)
	if err != nil {
		return false, err
	}
	defer file.Close()
	r, err := replay.NewReader(file, replay.Limits{})
	if err != nil {
		return false, err
	}
	first := r.Header().Created // of the first pass, as near as matters
	o := replay.PlayOptions{Config: config}
	if o.From, err = moment(c.From, first); err != nil {
		return false, fmt.Errorf("--from: %w", err)
	}
	if o.To, err = moment(c.To, first); err != nil {
		return false, fmt.Errorf("--to: %w", err)
	}
	report := &Report{Replay: c.Replay, Events: []Event{}}
	o.On = func(e *replay.Event, ev *diagnosis.Evidence) { report.add(e, ev, first.UnixNano(), c.Explain) }
	waiting := progress.Start("judging " + c.Replay)
	res, err := replay.Play(ctx, r, o)
	waiting.Stop()
	if err != nil && res.Passes == 0 {
		return false, err
	}
	report.finish(res, first.UnixNano(), c.Config)
	if err != nil {
		report.Error = err.Error()
	}
	if c.JSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		err = errors.Join(err, enc.Encode(report))
	} else {
		report.text(printable{out}, c.Explain)
	}
	return res.Same(), err
}

// recording is a file, or several one after the other.
type recording interface {
	io.ReadSeeker
	io.Closer
}

// open opens a recording, or all those in a directory, oldest first.
func open(path string) (recording, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return os.Open(path)
	}
	return openAll(path)
}

// moment reads a time of the command line as unix ns, 0 for none.
func moment(text string, first time.Time) (int64, error) {
	if text == "" {
		return 0, nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return first.Add(d).UnixNano(), nil
	}
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return t.UnixNano(), nil
	}
	if t, err := time.ParseInLocation("15:04:05", text, time.Local); err == nil {
		y, m, d := first.Local().Date()
		t = time.Date(y, m, d, t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), time.Local)
		if t.Before(first.Add(-time.Second)) {
			t = t.AddDate(0, 0, 1) // after midnight
		}
		return t.UnixNano(), nil
	}
	return 0, fmt.Errorf("%q is neither a duration (12s) nor a time (2006-01-02T15:04:05Z, 15:04:05)", text)
}

// overrides makes of NAME=VALUE a change of the engine's configuration.
func overrides(set map[string]string) (func(*diagnosis.Config), error) {
	if len(set) == 0 {
		return nil, nil
	}
	var probe diagnosis.Config
	v := reflect.ValueOf(&probe).Elem()
	for name, text := range set {
		f := v.FieldByNameFunc(func(field string) bool { return kebab(field) == name })
		if !f.IsValid() {
			var all []string
			for i := range v.NumField() {
				all = append(all, kebab(v.Type().Field(i).Name))
			}
			slices.Sort(all)
			return nil, fmt.Errorf("--config: no threshold is called %q; there are %s", name, strings.Join(all, ", "))
		}
		if err := setField(f, text); err != nil {
			return nil, fmt.Errorf("--config %s=%s: %w", name, text, err)
		}
		if f.IsZero() {
			return nil, fmt.Errorf("--config %s=%s: 0 stands for the default", name, text)
		}
	}
	return func(c *diagnosis.Config) {
		to := reflect.ValueOf(c).Elem()
		for i := range v.NumField() {
			if !v.Field(i).IsZero() {
				to.Field(i).Set(v.Field(i))
			}
		}
	}, nil
}

func setField(f reflect.Value, text string) error {
	switch {
	case f.Type() == reflect.TypeFor[time.Duration]():
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			return errors.New("want a duration, such as 3s")
		}
		f.SetInt(int64(d))
	case f.CanInt():
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 0 {
			return errors.New("want a number")
		}
		f.SetInt(n)
	case f.CanUint():
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return errors.New("want a number")
		}
		f.SetUint(n)
	case f.CanFloat():
		x, err := strconv.ParseFloat(text, 64)
		if err != nil || !(x >= 0) {
			return errors.New("want a number")
		}
		f.SetFloat(x)
	case f.Kind() == reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return errors.New("want true or false")
		}
		f.SetBool(b)
	default:
		return fmt.Errorf("a %s cannot be given here", f.Type())
	}
	return nil
}

// kebab turns a field's name into a flag's: ConfirmAfter is confirm-after.
func kebab(field string) string {
	var b strings.Builder
	for i, c := range field {
		if c >= 'A' && c <= 'Z' {
			if i > 0 {
				b.WriteByte('-')
			}
			c += 'a' - 'A'
		}
		b.WriteRune(c)
	}
	return b.String()
}
