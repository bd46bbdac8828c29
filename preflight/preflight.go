package preflight

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// ErrBad is what ranks other than 0 return of a check that found something bad: rank 0's report has it.
var ErrBad = errors.New("preflight: rank 0 has found something bad")

// Run is one rank's part of a check; cfg says who it is and where the others are. Rank 0 gets the
// report, also beside an error, which is why the report is not complete. The report is nil on
// other ranks, and where the ranks did not meet. The whole check ends with rank 0's ctx; those of the
// others last longer by PairTimeout and twice Slack, since rank 0 tells them that time is up.
func Run(ctx context.Context, cfg ccl.Config, o Options) (*Report, error) {
	began := time.Now()
	cfg.Name, cfg.Timeout = "preflight", o.JoinTimeout
	cfg.Device = ccl.CPU // GPUs have communicators of their own
	world, err := ccl.Init(ctx, cfg)
	if err != nil {
		return nil, err
	}
	m := &member{opts: &o, cfg: cfg, world: world, ctl: world.NewStream()}
	if world.Rank() == 0 {
		return lead(ctx, m, began)
	}
	return nil, attend(ctx, m)
}

// lead is rank 0's part.
func lead(ctx context.Context, m *member, began time.Time) (*Report, error) {
	con := &conductor{member: m, survey: newSurvey(m.world.Size())}
	err := con.conduct(ctx)
	r := newReport(con.survey, m.opts.Limits, began, err)
	told := false
	if !errors.Is(err, errSilent) {
		e := con.finish(ctx, r.status())
		if told = e == nil; !told && err == nil {
			err = e
			r = newReport(con.survey, m.opts.Limits, began, err)
		}
	}
	m.close(!told)
	return r, err
}

// attend is another rank's part.
func attend(ctx context.Context, m *member) error {
	status, err := m.follow(ctx)
	m.close(err != nil)
	switch {
	case errors.Is(err, ccl.ErrAborted) || status == StatusBad:
		return ErrBad
	case err != nil:
		return err
	case status != 0:
		return fmt.Errorf("rank %d: rank 0 could not measure everything", m.world.Rank())
	}
	return nil
}
