// Package top is `lockstep top`: the ranks of a job or of a node in a terminal.
//
// In flow a master's status, or the flight recorders of this node, read as any reader
// does; out flow a screen that is drawn again and again, one text, or JSON. It judges
// nothing: what a master has found is said where there is one.
package top

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// Cmd is the command line.
type Cmd struct {
	Master     string        `placeholder:"URL" help:"Show the job of the master at this address (http://127.0.0.1:9402), instead of this node's ranks."`
	CA         string        `name:"ca" type:"existingfile" placeholder:"FILE" help:"CA of the master's web certificate; users go into the URL."`
	Password   string        `name:"password-file" type:"existingfile" placeholder:"FILE" help:"Password of the URL's user: a command line is everybody's to read."`
	RuntimeDir string        `default:"${runtime_dir}" type:"path" help:"Where the ranks of this node keep their flight recorders." env:"LOCKSTEP_RUNTIME_DIR"`
	Job        string        `placeholder:"NAME" help:"Of this node's jobs show only this one."`
	Every      time.Duration `default:"1s" help:"Time between looks (default: 1s)."`
	Ranks      bool          `short:"r" help:"A line for each rank, not for ranks that stand alike."`
	Sort       string        `default:"state" enum:"state,rank,node,time" help:"Order of ranks: state (what needs eyes first), rank, node, or time (longest first)."`
	Once       bool          `short:"1" help:"Look once and end; so it does where the output is no terminal."`
	JSON       bool          `name:"json" help:"Look once and write JSON: an array of jobs."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Shows where each rank is: in which collective, for how long, and for whom it waits. Without --master it
reads the flight recorders of this node, and needs no agent; then it knows this node's ranks only.

Examples:
  lockstep top                                     the ranks of this node, once a second
  lockstep top --ranks --sort time                 a line for each, who has been in its state the longest first
  lockstep top --master http://127.0.0.1:9402      a whole job, with what its master has found
  lockstep top --master https://sre@master:9402 --password-file sre.password --ca ca.crt --once
  lockstep top --json | jq '.[].ranks[] | select(.state != "moving")'

^C ends it.`
}

// View is a job as it is shown.
type View struct {
	Job       string         `json:"job"`
	Where     string         `json:"where"` // the master's address, or the runtime directory
	At        time.Time      `json:"at"`
	Health    string         `json:"health"` // by the master; "" where there is none
	Attempt   uint32         `json:"attempt"`
	Step      uint64         `json:"step"`
	WorldSize int            `json:"world_size"`
	Open      []web.Incident `json:"open_incidents"`
	Ranks     []web.Standing `json:"ranks"`
	Stale     bool           `json:"stale,omitempty"`
}

// Run shows until ctx ends, or once.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	look := c.recorders
	if c.Master != "" {
		m, err := newMaster(c.Master, c.CA, c.Password)
		if err != nil {
			return err
		}
		look = m.look
	}
	term, isTerm := terminal(out)
	if c.JSON || c.Once || !isTerm {
		views, err := look(ctx)
		if err != nil {
			return fmt.Errorf("top: %w", err)
		}
		c.order(views)
		if c.JSON {
			enc := json.NewEncoder(out)
			enc.SetIndent("", "  ")
			return enc.Encode(views)
		}
		return c.print(out, views, paper{})
	}
	return c.follow(ctx, out, term, look)
}

// follow draws the screen until ctx ends.
func (c *Cmd) follow(ctx context.Context, out io.Writer, term *os.File, look func(context.Context) ([]View, error)) error {
	fmt.Fprint(out, "\x1b[?1049h\x1b[?25l") // another screen, no cursor
	defer fmt.Fprint(out, "\x1b[?25h\x1b[?1049l")
	every := max(c.Every, 100*time.Millisecond)
	for {
		views, err := look(ctx)
		if ctx.Err() != nil {
			return nil
		}
		c.order(views)
		p := paper{color: os.Getenv("NO_COLOR") == "", height: 24, width: 80}
		if size, e := unix.IoctlGetWinsize(int(term.Fd()), unix.TIOCGWINSZ); e == nil && size.Col > 0 && size.Row > 0 {
			p.width, p.height = int(size.Col), int(size.Row)
		}
		s := &screen{paper: p}
		if err != nil {
			s.line("%s", clean(err.Error()))
		}
		if err := c.print(s, views, p); err != nil {
			return err
		}
		if _, err := io.WriteString(out, s.frame()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
	}
}

var byState = []string{"gone", "stopped", "disk_sleep", web.StandingAwaited, web.StandingUnseen, web.StandingHeld, "exited", web.StandingMoving}

// order sorts the ranks as asked.
func (c *Cmd) order(views []View) {
	for _, v := range views {
		slices.SortStableFunc(v.Ranks, func(a, b web.Standing) int {
			switch c.Sort {
			case "node":
				return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Rank, b.Rank))
			case "time":
				return cmp.Or(cmp.Compare(b.Seconds, a.Seconds), cmp.Compare(a.Rank, b.Rank))
			case "state":
				if a.Culprit != b.Culprit {
					if a.Culprit {
						return -1
					}
					return 1
				}
				return cmp.Or(cmp.Compare(slices.Index(byState, a.State), slices.Index(byState, b.State)), cmp.Compare(a.Rank, b.Rank))
			}
			return cmp.Compare(a.Rank, b.Rank)
		})
	}
}

// terminal returns the file that out is when it is a terminal.
func terminal(out io.Writer) (*os.File, bool) {
	f, ok := out.(*os.File)
	if !ok {
		return nil, false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return f, err == nil && os.Getenv("TERM") != "dumb"
}
