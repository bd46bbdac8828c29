package presence

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

// TestAnothersDirectory: whoever makes the runtime directory's name first, open to all,
// leads no note and no lock elsewhere, and keeps nobody from attaching.
func TestAnothersDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "lockstep")
	precious := filepath.Join(t.TempDir(), "precious")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil { // as good as another user's
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(dir, 54321, 54321); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(precious, filepath.Join(dir, fmt.Sprintf(".attached.%d.%d", os.Geteuid(), os.Getpid()))); err != nil {
		t.Fatal(err)
	}
	// A lock that cannot be opened for writing, as another user's cannot.
	if err := os.Mkdir(path(dir, "attach", os.Geteuid()), 0o700); err != nil {
		t.Fatal(err)
	}
	end, err := Turn(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	if err := Attach(dir, "llm", os.Getpid()); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(precious); err != nil || string(b) != "precious" {
		t.Fatalf("another user has had %s overwritten: %q, %v", precious, b, err)
	}
	if n := Attached(dir, "llm"); n != 1 {
		t.Errorf("%d processes are attached", n)
	}
	leave, err := Hold(dir, Agent, Info{Web: "127.0.0.1:9400"})
	if err != nil {
		t.Fatal(err)
	}
	if info, ok := Find(dir, Agent); !ok || info.PID != os.Getpid() {
		t.Errorf("%+v, %v", info, ok)
	}
	leave()
	if _, ok := Find(dir, Agent); ok {
		t.Error("who has left is found")
	}
}

// TestLookersAreNotInTheWay: who looks whether one is there keeps none from being there, however long
// it takes to look, and two that want to be there are told apart.
func TestLookersAreNotInTheWay(t *testing.T) {
	dir := t.TempDir()
	leave, err := Hold(dir, Agent, Info{Web: "first"})
	if err != nil {
		t.Fatal(err)
	}
	leave()
	stop := make(chan struct{})
	var lookers sync.WaitGroup
	for range 4 {
		lookers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				Find(dir, Agent)
			}
		})
	}
	for range 100 {
		leave, err := Hold(dir, Agent, Info{Web: "next"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Hold(dir, Agent, Info{}); !errors.Is(err, syscall.EWOULDBLOCK) {
			t.Fatalf("two are there: %v", err)
		}
		leave()
	}
	close(stop)
	lookers.Wait()
}
