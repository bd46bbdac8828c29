package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/rogpeppe/go-internal/testscript"

	free "github.com/lockstep-ccl/lockstep/internal/ports"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"lockstep": main, "freshroot": freshroot})
}

// TestScripts runs the command line as a user does. Beside testscript's own
// commands, scripts have:
//
//	ports NAME...                   sets each to a host:port of this machine that nobody else is given
//	http [-code N] [-has TEXT] [-token T] [-post BODY] URL
//	                                asks until the answer has this status (200) and the text, and prints the body
//	alert URL JOB INCIDENT          sends a confirmed communication_hang of the job, with the token in $TOKEN
//	await FILE TEXT                 waits until the file holds the text
//
// $RECORDINGS has recordings of real jobs.
func TestScripts(t *testing.T) {
	testscript.Run(t, scripts("testdata/script"))
}

func scripts(dir string) testscript.Params {
	return testscript.Params{
		Dir:                 dir,
		RequireUniqueNames:  true,
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("TOKEN", "0123456789abcdef0123456789abcdef")
			e.Setenv("XDG_STATE_HOME", e.WorkDir+"/state")
			e.Setenv("LOCKSTEP_ATTACH_WAIT", "2m") // that it is quick on a busy machine is not what is tested
			recordings, err := filepath.Abs("../../diagnosis/replay/testdata")
			if err != nil {
				return err
			}
			e.Setenv("RECORDINGS", recordings)
			if err := os.WriteFile(e.WorkDir+"/token", []byte(e.Getenv("TOKEN")+"\n"), 0o600); err != nil {
				return err
			}
			return os.Mkdir(e.WorkDir+"/rt", 0o700)
		},
		Condition: func(cond string) (bool, error) {
			if cond == "hup" {
				return !signal.Ignored(syscall.SIGHUP), nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"ports": ports, "http": ask, "alert": alert, "await": await},
	}
}

// bound is far beyond what anything here takes.
const bound = 2 * time.Minute

func ports(ts *testscript.TestScript, _ bool, args []string) {
	held, err := free.Hold("127.0.0.1", len(args))
	ts.Check(err)
	ts.Defer(func() { _ = held.Close() })
	for i, name := range args {
		ts.Setenv(name, held.Addrs[i])
	}
}

func ask(ts *testscript.TestScript, neg bool, args []string) {
	method, code, has, token, body := http.MethodGet, "200", "", "", ""
	for len(args) > 2 {
		switch args[0] {
		case "-code":
			code = args[1]
		case "-has":
			has = args[1]
		case "-token":
			token = args[1]
		case "-post":
			method, body = http.MethodPost, args[1]
		default:
			ts.Fatalf("http: unknown option %s", args[0])
		}
		args = args[2:]
	}
	if neg || len(args) != 1 {
		ts.Fatalf("usage: http [-code N] [-has TEXT] [-token T] [-post BODY] URL")
	}
	var answer string
	until(ts, func() error {
		req, err := http.NewRequest(method, args[0], strings.NewReader(body))
		ts.Check(err)
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		if answer = string(b); fmt.Sprint(resp.StatusCode) != code {
			return fmt.Errorf("%s: %s", resp.Status, answer)
		}
		if !strings.Contains(answer, has) {
			return fmt.Errorf("no %q in %s", has, answer)
		}
		return nil
	})
	_, err := io.WriteString(ts.Stdout(), answer)
	ts.Check(err)
}

func alert(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: alert URL JOB INCIDENT")
	}
	body, err := json.Marshal(map[string]any{"version": "4", "alerts": []any{map[string]any{
		"status": "firing", "startsAt": time.Now(), "fingerprint": args[2],
		"labels": map[string]string{
			"alertname": "LockstepCommunicationHang", "training_job": args[1], "incident": args[2],
			"class": "communication_hang", "level": "confirmed", "culprit": "rank 0 → rank 1",
		},
	}}})
	ts.Check(err)
	ask(ts, false, []string{"-token", ts.Getenv("TOKEN"), "-post", string(body), args[0]})
}

func await(ts *testscript.TestScript, _ bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: await FILE TEXT")
	}
	until(ts, func() error {
		b, err := os.ReadFile(ts.MkAbs(args[0]))
		if err == nil && !bytes.Contains(b, []byte(args[1])) {
			err = fmt.Errorf("%s has no %q: %s", args[0], args[1], b)
		}
		return err
	})
}

func until(ts *testscript.TestScript, f func() error) {
	var err error
	for begin := time.Now(); time.Since(begin) < bound; time.Sleep(20 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	ts.Fatalf("not within %v: %v", bound, err)
}

// TestHelp reads the help of every command, hidden ones aside.
func TestHelp(t *testing.T) {
	k, err := kong.New(&cli{}, options()...)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range k.Model.Leaves(true) {
		var out bytes.Buffer
		k, err := kong.New(&cli{}, options(kong.Writers(&out, &out), kong.Exit(func(int) {}))...)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = k.Parse(append(strings.Fields(n.FullPath())[1:], "--help")) // --help exits; here it goes on to complain of what is missing
		help := out.String()
		if !strings.Contains(help, "Examples:") || !strings.Contains(help, n.FullPath()) {
			t.Errorf("the help of %s has no examples:\n%s", n.Name, help)
		}
		if strings.Contains(help, "${") {
			t.Errorf("the help of %s has a variable without a value:\n%s", n.Name, help)
		}
		if n.Help == "" || !strings.HasSuffix(n.Help, ".") {
			t.Errorf("%s: %q is no sentence", n.Name, n.Help)
		}
		for _, group := range n.AllFlags(true) {
			for _, f := range group {
				if f.Help == "" {
					t.Errorf("%s: flag --%s has no help", n.Name, f.Name)
				}
			}
		}
	}
}
