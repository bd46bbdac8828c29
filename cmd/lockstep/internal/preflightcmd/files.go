package preflightcmd

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/lockstep-ccl/lockstep/preflight"
)

// save writes the files that the command line asks for.
func (c *Cmd) save(r *preflight.Report) error {
	if c.JSON != "" {
		b, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if err := replace(c.JSON, append(b, '\n')); err != nil {
			return err
		}
	}
	if c.Good != "" {
		var b strings.Builder
		for _, name := range r.Good {
			fmt.Fprintln(&b, name)
		}
		if err := replace(c.Good, []byte(b.String())); err != nil {
			return err
		}
	}
	if c.Prom != "" {
		return textfile(r, c.Prom)
	}
	return nil
}

// replace writes a file as a whole: whoever reads it sees the old one or the new.
func replace(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.Write(b)
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
