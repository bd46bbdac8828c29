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
	if !signal.Ignored(syscall.SIGHUP) { // by nohup
		stopping = append(stopping, syscall.SIGHUP)
	}
	if !isAttach(os.Args[1:]) || !signal.Ignored(syscall.SIGINT) { // what attach runs has it as attach had: a shell ignores it for what runs in the background
		stopping = append(stopping, syscall.SIGINT)
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
