// Command tool finds a program that Lockstep runs, or builds it into the user's cache folder, and prints its path.
//
//	go run ./deploy/local/tool jaeger
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/lockstep-ccl/lockstep/deploy/local"
)

func main() {
	if len(os.Args) != 2 || strings.HasPrefix(os.Args[1], "-") {
		fmt.Fprintln(os.Stderr, "usage: tool "+strings.Join(local.Tools(), "|"))
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	path, err := local.Find(ctx, os.Args[1], os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "tool:", err)
		os.Exit(1)
	}
	fmt.Println(path)
}
