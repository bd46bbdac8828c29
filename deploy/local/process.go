package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// server is one child process and how to start it again.
type server struct {
	name   string
	path   string
	args   []string
	url    string       // base URL; /-/ready answers 200 when it serves, unless health is set
	health string       // URL that does
	client *http.Client // that asks; nil for one without a password
	log    string       // appended to
	child  *child
}

// child is one run of a server.
type child struct {
	pid     int
	logFrom int64         // where in the log this run begins
	done    chan struct{} // closed when it was reaped
	err     error         // valid after done

	mu     sync.Mutex
	reaped bool // from now on pid may be somebody else's
}

func (s *server) start() error {
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	defer log.Close()
	from, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	cmd := exec.Command(s.path, s.args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid:   true,            // an interrupt typed at the terminal is for us, who stop it in order
		Pdeathsig: syscall.SIGKILL, // nothing stays behind when we are killed
	}
	c := &child{logFrom: from, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// Pdeathsig fires when the thread that forked ends, so that thread is
		// kept for as long as the child lives.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			c.await(cmd)
			close(c.done)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	c.pid = cmd.Process.Pid
	s.child = c
	return nil
}

// await waits for the run to end, and reaps it while nobody signals it.
func (c *child) await(cmd *exec.Cmd) {
	for errors.Is(unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = cmd.Wait()
	c.reaped = true
}

const readyTimeout = 2 * time.Second

// ready waits until the server serves, its process ends, or ctx is done.
func (s *server) ready(ctx context.Context) error {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	if s.client != nil {
		client = *s.client
	}
	client.Timeout = readyTimeout
	defer client.CloseIdleConnections()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, cmp.Or(s.health, s.url+"/-/ready"), nil)
		if err != nil {
			return err
		}
		if resp, err := client.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-s.child.done:
			return s.exited(s.child)
		case <-ctx.Done():
			return fmt.Errorf("wait until %s at %s is ready: %w; its log ends:\n%s", s.name, s.url, context.Cause(ctx), s.tail(s.child))
		case <-time.After(25 * time.Millisecond):
		}
	}
}

// ErrExited is wrapped by the errors about a server that ended by itself.
var ErrExited = errors.New("exited")

func (s *server) exited(c *child) error {
	how := "status 0"
	if c.err != nil {
		how = c.err.Error()
	}
	return fmt.Errorf("%s %w by itself (%s); its log ends:\n%s", s.name, ErrExited, how, s.tail(c))
}

// tail returns the last lines of what this run logged.
func (s *server) tail(c *child) string {
	const most = 4 << 10
	f, err := os.Open(s.log)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err.Error()
	}
	from := max(c.logFrom, info.Size()-most)
	data, err := io.ReadAll(io.NewSectionReader(f, from, info.Size()-from))
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}

// signal reaches the whole process group. It does nothing once the child was
// reaped: the number may be another process's by then.
func (c *child) signal(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.reaped {
		_ = syscall.Kill(-c.pid, sig) // it may have ended just now
	}
}

// kill ends the run at once and returns when it was reaped.
func (c *child) kill() {
	c.signal(syscall.SIGKILL)
	<-c.done
}

// stop asks, waits a while, and kills.
func (c *child) stop(patience time.Duration) {
	c.signal(syscall.SIGTERM)
	select {
	case <-c.done:
	case <-time.After(patience):
		c.kill()
	}
}
