package browser

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// names under which the browser may be installed.
var names = []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"}

// Find returns the browser's path, or an error that says what to install.
func Find() (string, error) {
	for _, n := range names {
		if path, err := exec.LookPath(n); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no browser: install Debian's chromium (looked for %v)", names)
}

// Within bounds each command.
const Within = 60 * time.Second

// Browser is one running Chromium. Its methods may be called from several goroutines.
type Browser struct {
	cmd  *exec.Cmd
	in   *os.File
	dir  string
	done chan struct{} // closed when the browser hung up

	mu    sync.Mutex
	last  int
	wait  map[int]chan answer
	pages map[string]*Page
}

type answer struct {
	ID     int             `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
	Method  string          `json:"method"`
	Session string          `json:"sessionId"`
	Params  json.RawMessage `json:"params"`
}

// Start starts the browser with a profile of its own.
func Start() (*Browser, error) {
	path, err := Find()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "lockstep-browser-")
	if err != nil {
		return nil, err
	}
	theirIn, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, "--headless=new", "--remote-debugging-pipe", "--user-data-dir="+dir, "--no-first-run", "--disable-gpu", "--hide-scrollbars",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions", "--mute-audio", "--disable-dev-shm-usage", "--force-color-profile=srgb")
	if os.Geteuid() == 0 {
		cmd.Args = append(cmd.Args, "--no-sandbox")
	}
	cmd.Env = append(os.Environ(), "HOME="+dir)
	cmd.ExtraFiles = []*os.File{theirIn, theirOut}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	theirIn.Close()
	theirOut.Close()
	if err != nil {
		in.Close()
		out.Close()
		os.RemoveAll(dir)
		return nil, fmt.Errorf("start %s: %w", path, err)
	}
	b := &Browser{cmd: cmd, in: in, dir: dir, done: make(chan struct{}), wait: map[int]chan answer{}, pages: map[string]*Page{}}
	go b.read(out)
	return b, nil
}

// Close ends the browser and everything that it started.
func (b *Browser) Close() {
	_ = b.call("", "Browser.close", nil, nil)
	select {
	case <-b.done:
	case <-time.After(5 * time.Second):
	}
	b.in.Close()
	_ = syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL)
	_ = b.cmd.Wait()
	<-b.done
	os.RemoveAll(b.dir)
}

func (b *Browser) read(out io.ReadCloser) {
	defer close(b.done)
	defer out.Close()
	r := bufio.NewReaderSize(out, 1<<20)
	for {
		text, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var a answer
		if json.Unmarshal(text[:len(text)-1], &a) != nil {
			continue
		}
		b.mu.Lock()
		w, page := b.wait[a.ID], b.pages[a.Session]
		delete(b.wait, a.ID)
		b.mu.Unlock()
		switch {
		case a.ID != 0 && w != nil:
			w <- a
		case a.Method != "" && page != nil:
			page.event(a.Method, a.Params)
		}
	}
}

// call sends a command and waits for its answer.
func (b *Browser) call(session, method string, params, result any) error {
	if params == nil {
		params = struct{}{}
	}
	b.mu.Lock()
	b.last++
	id, w := b.last, make(chan answer, 1)
	b.wait[id] = w
	text, err := json.Marshal(struct {
		ID      int    `json:"id"`
		Method  string `json:"method"`
		Params  any    `json:"params"`
		Session string `json:"sessionId,omitempty"`
	}{id, method, params, session})
	if err == nil {
		_, err = b.in.Write(append(text, 0))
	}
	b.mu.Unlock()
	if err != nil {
		return fmt.Errorf("browser: %s: %w", method, err)
	}
	select {
	case a := <-w:
		if a.Error != nil {
			return fmt.Errorf("browser: %s: %s", method, a.Error.Message)
		}
		if result != nil {
			return json.Unmarshal(a.Result, result)
		}
		return nil
	case <-b.done:
		return fmt.Errorf("browser: %s: %w", method, errors.New("it has ended"))
	case <-time.After(Within):
		return fmt.Errorf("browser: %s: no answer within %v", method, Within)
	}
}
