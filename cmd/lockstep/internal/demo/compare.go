package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/dashboards"
	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// compare ends the job and trains again, undisturbed and unobserved, to see
// that the losses are the same to the last bit.
func (c *Cmd) compare(ctx context.Context, out *printer, cl *cluster) error {
	cl.stop()
	got, err := cl.losses()
	if err != nil {
		return err
	}
	if len(got) == 0 {
		return errors.New("the job has made no step whose loss could be compared")
	}
	shrunk, err := train.ReadShrinks(filepath.Join(cl.dir, "train"))
	if err != nil {
		return err
	}
	dir := filepath.Join(cl.dir, "reference")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	began := time.Now()
	shape := cl.shape
	for _, shrunk := range shrunk { // the same replicas for the same steps
		if shrunk.Resumed > 0 {
			if err := cl.program.undisturbed(ctx, shape, dir, shrunk.Resumed); err != nil {
				return err
			}
		}
		shape.dp = shrunk.To
	}
	if err := cl.program.undisturbed(ctx, shape, dir, len(got)); err != nil {
		return err
	}
	want, err := train.ReadLosses(filepath.Join(dir, train.LossLog))
	if err != nil {
		return err
	}
	if len(want) != len(got) {
		return fmt.Errorf("undisturbed run made %d steps, not %d", len(want), len(got))
	}
	for i := range want {
		if got[i] != want[i] {
			return fmt.Errorf("loss of step %d is %x, that of an undisturbed run %x", i+1, got[i], want[i])
		}
	}
	out.say("\n%s losses of all %d steps equal those of an undisturbed run bit for bit (%.4f → %.4f; its %.1f s)", out.paint("32", "✓"), len(got), got[0], got[len(got)-1], time.Since(began).Seconds())
	return nil
}

// panels checks the dashboards on what Prometheus has scraped.
func (c *cluster) panels(ctx context.Context) error {
	if !sleep(ctx, 3*time.Second) { // rates need a few scrapes after the restart
		return ctx.Err()
	}
	var err error
	for _, v := range []dashboards.Vars{{Communicator: "dp0", Collective: "ReduceScatter"}} {
		v.Job, v.Node, v.RateInterval = c.job, c.agents[0], 2*time.Second
		err = errors.Join(err, dashboards.Check(ctx, c.stack.PrometheusURL, c.client, v))
	}
	return err
}

// red looks for what is red on the dashboards and on the status page.
func (c *cluster) red(ctx context.Context) error {
	var errs []error
	for _, node := range c.agents {
		errs = append(errs, dashboards.Red(ctx, c.stack.PrometheusURL, c.client, dashboards.Vars{Job: c.job, Node: node, RateInterval: 2 * time.Second}))
	}
	var st web.Status
	if err := c.get(ctx, c.web.URL(c.master)+"/api/v1/status", &st); err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, m := range st.Delay {
		if m.Tells {
			errs = append(errs, fmt.Errorf("the status page shows the delays of %s: %+v", m.Communicator, m.Worst))
		}
	}
	for _, s := range st.Situations {
		if s.State != web.StandingMoving {
			errs = append(errs, fmt.Errorf("the status page says %s of ranks %s", s.State, s.Who))
		}
	}
	return errors.Join(errs...)
}

// losses reads the job's loss log: one number a finished step.
func (c *cluster) losses() ([]float64, error) {
	return train.ReadLosses(filepath.Join(c.dir, "train", train.LossLog))
}
