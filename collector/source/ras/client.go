package ras

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
)

// DefaultAddr is where RAS listens unless NCCL_RAS_ADDR says otherwise.
const DefaultAddr = "localhost:28028"

// Ask asks RAS at addr for its status, within ctx. patience is how long RAS may wait for
// processes that do not answer it.
func Ask(ctx context.Context, addr string, patience time.Duration) (*collector.RAS, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	in := bufio.NewReaderSize(conn, 4<<10)
	say := func(line string) (string, error) {
		if _, err := fmt.Fprintf(conn, "%s\n", line); err != nil {
			return "", fmt.Errorf("ask RAS at %s: %w", addr, err)
		}
		answer, err := in.ReadSlice('\n') // at most 4 KiB
		if err != nil {
			return "", fmt.Errorf("ask RAS at %s: answer to %q: %w", addr, line, err)
		}
		return strings.TrimSpace(string(answer)), nil
	}
	// The greeting is optional to the server; it tells that this is RAS at all.
	hello, err := say("CLIENT PROTOCOL 2")
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(strings.ToUpper(hello), "SERVER PROTOCOL ") {
		return nil, fmt.Errorf("%w: at %s somebody says %.60q", ErrAnswer, addr, hello)
	}
	// What a version does not know it answers with an error, and goes on: RAS's own
	// patience is then its default, and the format is text.
	for _, line := range []string{fmt.Sprintf("TIMEOUT %d", max(1, int(patience.Seconds()))), "SET FORMAT json"} {
		if _, err := say(line); err != nil {
			return nil, err
		}
	}
	if _, err := io.WriteString(conn, "VERBOSE STATUS\n"); err != nil {
		return nil, fmt.Errorf("ask RAS at %s: %w", addr, err)
	}
	answer, err := io.ReadAll(io.LimitReader(in, maxAnswer))
	if err != nil && len(answer) == 0 {
		return nil, fmt.Errorf("ask RAS at %s: %w", addr, err)
	}
	return Parse(answer)
}
