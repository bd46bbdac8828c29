package record_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/internal/stranger"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	if stranger.Role() != "" {
		stranger.Play(func() error { // of somebody who takes names in advance
			for dir := range strings.SplitSeq(os.Getenv("TAKE"), ":") {
				switch stranger.Role() {
				case "directory":
					if err := os.Mkdir(dir, 0o777); err != nil {
						return err
					}
				case "link":
					if err := os.Symlink(os.Getenv("TO"), dir); err != nil {
						return err
					}
				case "file":
					if err := os.WriteFile(dir, nil, 0o666); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	os.Exit(m.Run())
}

// TestDirWithoutTrouble: what a user gets where nobody does any harm.
func TestDirWithoutTrouble(t *testing.T) {
	base := filepath.Join(t.TempDir(), "rt")
	t.Setenv("LOCKSTEP_RUNTIME_DIR", base)
	for range 2 {
		if dir, refused, err := record.Dir("key"); dir != base || len(refused) > 0 || err != nil {
			t.Errorf("where the variable names it: %s, %v, %v", dir, refused, err)
		}
	}
	shared := t.TempDir()
	if err := os.Chmod(shared, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	want := filepath.Join(shared, fmt.Sprint(os.Geteuid()))
	if dir, refused, err := record.DirBelow(shared, "key"); dir != want || len(refused) > 0 || err != nil {
		t.Errorf("where everybody has one: %s, %v, %v, want %s", dir, refused, err, want)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(base, link); err != nil {
		t.Fatal(err)
	}
	if dir, refused, err := record.DirBelow(link, "key"); dir != base || len(refused) > 0 || err != nil {
		t.Errorf("behind a link of one's own: %s, %v, %v", dir, refused, err)
	}
	loose := t.TempDir()
	if err := os.Chmod(loose, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := record.Create(record.Options{Dir: loose}); !errors.Is(err, record.ErrForeign) || !strings.Contains(err.Error(), "chmod go-w") {
		t.Errorf("where others can write: %v", err)
	}
}

// TestSquattedDir: who takes a user's directory in advance, however, costs that user the
// name and nothing more; nothing is written where it leads.
func TestSquattedDir(t *testing.T) {
	for _, how := range []string{"directory", "link", "file"} {
		t.Run(how, func(t *testing.T) {
			open := stranger.Open(t)
			base := filepath.Join(open, "lockstep")
			own := fmt.Sprintf("%s-%d", base, os.Geteuid())
			trap := t.TempDir()
			stranger.Start(t, stranger.UID, how, "TAKE="+base+":"+own, "TO="+trap)
			want := own + ".key"
			for range 2 {
				dir, refused, err := record.DirBelow(base, "key")
				if dir != want || err != nil || len(refused) != 2 || !errors.Is(refused[1], record.ErrForeign) {
					t.Fatalf("%s, %v, %v; want %s", dir, refused, err, want)
				}
			}
			w, err := record.Create(record.Options{Dir: want})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if dir, _, err := record.DirBelow(base, ""); err == nil || !errors.Is(err, record.ErrForeign) || dir != "" {
				t.Errorf("without a key: %s, %v", dir, err)
			}
			if names, _ := os.ReadDir(trap); len(names) > 0 {
				t.Errorf("written where a link leads: %v", names)
			}
			places, refused := record.Places(base)
			if len(refused) == 0 {
				t.Error("a reader does not see that the name is taken")
			}
			found := false
			for _, p := range places {
				found = found || p.Path == want && int(p.Owner) == os.Geteuid() && !p.Shared
			}
			if !found {
				t.Errorf("a reader does not find %s: %v", want, places)
			}
		})
	}
}

// TestShareDir: where a reader shares a directory, each user has one in it, and what is
// another's, or a link, is not shared.
func TestShareDir(t *testing.T) {
	base := filepath.Join(t.TempDir(), "a", "rt")
	for range 2 {
		if err := record.ShareDir(base); err != nil {
			t.Fatal(err)
		}
	}
	want := filepath.Join(base, fmt.Sprint(os.Geteuid()))
	if dir, refused, err := record.DirBelow(base, "key"); dir != want || len(refused) > 0 || err != nil {
		t.Errorf("%s, %v, %v, want %s", dir, refused, err, want)
	}
	places, refused := record.Places(base)
	if len(places) != 2 || !places[0].Shared || places[1].Path != want || len(refused) > 0 {
		t.Errorf("places %+v, %v", places, refused)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(base, link); err != nil {
		t.Fatal(err)
	}
	if err := record.ShareDir(link); err == nil {
		t.Error("a link is shared")
	}
	if os.Geteuid() != 0 {
		return
	}
	foreign := t.TempDir()
	if err := os.Chown(foreign, 4711, 4711); err != nil {
		t.Fatal(err)
	}
	if err := record.ShareDir(foreign); !errors.Is(err, record.ErrForeign) {
		t.Errorf("another user's directory: %v", err)
	}
}
