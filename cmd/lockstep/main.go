// Command lockstep is the whole of Lockstep in one binary; `lockstep --help` lists its parts.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
)

func main() {
	if len(os.Args) == 1 {
		os.Args = append(os.Args, "--help")
	}
	var c cli
	k := parse(&c, os.Args[1:])
	stopping := []os.Signal{syscall.SIGTERM}
	for _, s := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if !signal.Ignored(s) { // by nohup, or by a shell for what runs in the background: what attach runs has them as attach has
			stopping = append(stopping, s)
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), stopping...)
	context.AfterFunc(ctx, stop) // a second ^C does not wait
	log := c.Log.Logger()
	slog.SetDefault(log)
	k.BindTo(ctx, (*context.Context)(nil))
	k.BindTo(os.Stdout, (*io.Writer)(nil))
	err := k.Run(log)
	var asks interface { // for a status of its own; without a text, all was said already
		error
		ExitStatus() int
	}
	switch {
	case errors.As(err, &asks):
		if asks.Error() != "" {
			fmt.Fprintln(os.Stderr, "lockstep:", err)
		}
		os.Exit(asks.ExitStatus())
	case err == nil:
	case errors.Is(err, train.ErrStopped): // as if SIGTERM had ended it: a scheduler takes 0 for done
		os.Exit(128 + int(syscall.SIGTERM))
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "lockstep:", err)
		os.Exit(1)
	}
}
