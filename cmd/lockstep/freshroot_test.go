package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A root is what a container gives a new user: the system's programs, read-only, and else nothing but an
// empty home, a network of its own, and the directories that an administrator makes for a service.
type root struct {
	Dir      string            // where it is mounted
	Lockstep string            // the program
	Files    map[string]string // in the home, or absolute; those with #! are programs
	Binds    map[string]string // files of the machine, by where they are in the root
	Plays    []play
}

// A play is one run of a line of shell, in the home.
type play struct {
	Line   string
	Before string // run before, for what the line takes as given
	After  string // added to the line
	Status int    // that it ends with
	Or     int    // another one that is as good, if not 0
	Ready  string // an address that answers, or else a pattern in the output; the line is ended then
	Out    string // a pattern that its output must have
	Never  string // and one that it must not have
}

// user is who plays, when root has made the root.
const user = 1000

// writable are directories that an administrator makes for the user, beside the home.
var writable = []string{"/etc/lockstep", "/var/lib/lockstep", "/var/lib/node_exporter", "/run/lockstep"}

// start plays in a new root and returns what went wrong, play by play.
func (r root) start(ctx context.Context, t *testing.T) []string {
	t.Helper()
	program, err := exec.LookPath("lockstep")
	if err != nil {
		t.Fatal(err)
	}
	r.Dir, r.Lockstep = t.TempDir(), program
	spec, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(program), "freshroot"))
	cmd.Stdin = bytes.NewReader(spec)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL,
	}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	err = cmd.Run()
	if errors.Is(err, os.ErrPermission) || cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == refused {
		t.Skipf("no fresh root for this user: %v %s", err, log.Bytes())
	}
	var wrong []string
	if jerr := json.Unmarshal(out.Bytes(), &wrong); err != nil || jerr != nil {
		t.Fatalf("fresh root: %v, %v\n%s%s", err, jerr, out.Bytes(), log.Bytes())
	}
	return wrong
}

// refused is the status of a root that the kernel does not let this user make.
const refused = 77

// freshroot is the first process of a root.
func freshroot() {
	var r root
	err := json.NewDecoder(os.Stdin).Decode(&r)
	if err == nil {
		err = r.enter()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "freshroot:", err)
		if errors.Is(err, os.ErrPermission) {
			os.Exit(refused)
		}
		os.Exit(1)
	}
	wrong := make([]string, len(r.Plays))
	for i, p := range r.Plays {
		if err := p.run(); err != nil {
			wrong[i] = err.Error()
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(wrong); err != nil {
		os.Exit(1)
	}
}

// enter makes the root and moves into it.
func (r root) enter() error {
	steps := []func() error{
		func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		func() error { return unix.Mount("root", r.Dir, "tmpfs", 0, "mode=755") },
		r.system, r.devices, r.files, network,
		func() error { return unix.Sethostname([]byte("fresh")) },
		func() error { return unix.Chroot(r.Dir) },
		func() error { return os.Chdir("/home/adopter") },
	}
	for i, f := range steps {
		if err := f(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

// system brings the machine's programs, /proc and /sys.
func (r root) system() error {
	for _, dir := range []string{"/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"} {
		st, err := os.Lstat(dir)
		if err != nil {
			continue
		}
		if st.Mode()&os.ModeSymlink != 0 {
			to, err := os.Readlink(dir)
			if err != nil {
				return err
			}
			if err := os.Symlink(to, r.Dir+dir); err != nil {
				return err
			}
			continue
		}
		if err := r.bind(dir, dir); err != nil {
			return err
		}
	}
	for _, fs := range []string{"proc", "sysfs"} {
		dir := r.Dir + "/" + strings.TrimSuffix(fs, "fs")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(fs, dir, fs, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return fmt.Errorf("mount %s: %w", fs, err)
		}
	}
	return nil
}

// bind shows a file or directory of the machine in the root.
func (r root) bind(from, to string) error {
	st, err := os.Stat(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(r.Dir+to), 0o755); err != nil {
		return err
	}
	if st.IsDir() {
		err = os.Mkdir(r.Dir+to, 0o755)
	} else {
		err = os.WriteFile(r.Dir+to, nil, 0o755)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(from, r.Dir+to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	return nil
}

func (r root) devices() error {
	for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
		if err := r.bind("/dev/"+name, "/dev/"+name); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"} {
		if err := os.Symlink(to, r.Dir+"/dev/"+name); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/dev/shm", "/tmp"} { // as small as lockstep doctor calls well
		if err := os.Mkdir(r.Dir+dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", r.Dir+dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777,size=256m"); err != nil {
			return err
		}
	}
	return nil
}

// files makes the home, what an administrator has made for its user, and the user.
func (r root) files() error {
	if err := r.bind(r.Lockstep, "/opt/lockstep/bin/lockstep"); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"/etc/passwd": fmt.Sprintf("root:x:0:0::/root:/bin/sh\nadopter:x:%d:%d::/home/adopter:/bin/bash\n", user, user),
		"/etc/group":  fmt.Sprintf("root:x:0:\nadopter:x:%d:\n", user),
		"/etc/hosts":  "127.0.0.1 localhost fresh head planner tempo master n1\n",
		"/opt/lockstep/bin/libnccl-profiler-lockstep.so": "",
	} {
		if err := os.WriteFile(r.Dir+name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	home := r.Dir + "/home/adopter"
	for _, dir := range append([]string{"/home/adopter"}, writable...) {
		if err := os.MkdirAll(r.Dir+dir, 0o755); err != nil {
			return err
		}
		if err := r.give(r.Dir + dir); err != nil {
			return err
		}
	}
	for to, from := range r.Binds {
		if err := r.bind(from, to); err != nil {
			return err
		}
	}
	for name, text := range r.Files {
		path, mode := home+"/"+name, os.FileMode(0o600)
		if filepath.IsAbs(name) {
			path = r.Dir + name
		}
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			return err
		}
		if err := r.give(path); err != nil {
			return err
		}
	}
	return nil
}

// give makes it the user's, where there is another one than root.
func (root) give(path string) error {
	if c := credential(); c != nil {
		return os.Chown(path, user, user)
	}
	return nil
}

// credential is the user's; nil where the kernel knows only one user here.
func credential() *syscall.Credential {
	if m, err := os.ReadFile("/proc/self/uid_map"); err == nil && len(strings.Fields(string(m))) == 3 && strings.Fields(string(m))[2] == "1" {
		return nil
	}
	return &syscall.Credential{Uid: user, Gid: user}
}

// network is a loopback interface with the address that examples use.
func network() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	for name, addr := range map[string][]byte{"lo": {127, 0, 0, 1}, "lo:1": {10, 0, 0, 5}} {
		f, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		if err := f.SetInet4Addr(addr); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(s, unix.SIOCSIFADDR, f); err != nil {
			return fmt.Errorf("address of %s: %w", name, err)
		}
		f.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, f); err != nil {
			return fmt.Errorf("%s up: %w", name, err)
		}
	}
	return nil
}

// A transcript is what a line has written so far.
type transcript struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (t *transcript) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.Write(p)
}

func (t *transcript) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}

func shell(script string, out *transcript) *exec.Cmd {
	cmd := exec.Command("/bin/bash", "-ec", script)
	cmd.Env = []string{"HOME=/home/adopter", "USER=adopter", "LANG=C.UTF-8", "PATH=/opt/lockstep/bin:/usr/local/bin:/usr/bin:/bin",
		"LOCKSTEP_ATTACH_WAIT=2m"} // on a busy machine
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential(), Setpgid: true}
	cmd.WaitDelay = 5 * time.Second // daemons that outlive the line hold its output
	return cmd
}

// playBound is far beyond what any line takes.
const playBound = 2 * time.Minute

func (p play) run() error {
	out := &transcript{}
	if p.Before != "" {
		if err := shell(p.Before, out).Run(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
			return fmt.Errorf("%s: %w\n%s", p.Before, err, out)
		}
	}
	cmd := shell(p.Line+p.After, out)
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	kill := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); <-ended }
	if p.Ready != "" {
		if err := p.await(out, ended); err != nil {
			kill()
			return fmt.Errorf("%w\n%s", err, out)
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	select {
	case err := <-ended:
		if err != nil && !errors.Is(err, exec.ErrWaitDelay) && cmd.ProcessState.ExitCode() < 0 {
			return fmt.Errorf("%w\n%s", err, out)
		}
	case <-time.After(playBound):
		kill()
		return fmt.Errorf("not over after %v\n%s", playBound, out)
	}
	is := cmd.ProcessState.ExitCode()
	quicker := is == 0 && p.Ready != "" // it ended by itself
	if is != p.Status && !quicker && (p.Or == 0 || is != p.Or) {
		return fmt.Errorf("status %d, want %d\n%s", is, p.Status, out)
	}
	if p.Out != "" && !regexp.MustCompile(p.Out).MatchString(out.String()) {
		return fmt.Errorf("says no %q\n%s", p.Out, out)
	}
	if p.Never != "" && regexp.MustCompile(p.Never).MatchString(out.String()) {
		return fmt.Errorf("says %q\n%s", p.Never, out)
	}
	return nil
}

// await waits until the line is ready.
func (p play) await(out *transcript, ended chan error) error {
	var err error
	for begin := time.Now(); time.Since(begin) < playBound; time.Sleep(50 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			if !strings.HasPrefix(p.Ready, "http") && regexp.MustCompile(p.Ready).MatchString(out.String()) {
				return nil // it was quicker than this loop
			}
			return fmt.Errorf("ended before it was ready: %v", err)
		default:
		}
		if !strings.HasPrefix(p.Ready, "http") {
			if regexp.MustCompile(p.Ready).MatchString(out.String()) {
				return nil
			}
			err = fmt.Errorf("says no %q", p.Ready)
			continue
		}
		var resp *http.Response
		if resp, err = http.Get(p.Ready); err != nil {
			continue
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return nil
		}
		err = fmt.Errorf("%s: %s", p.Ready, resp.Status)
	}
	return fmt.Errorf("not ready after %v: %w", playBound, err)
}
