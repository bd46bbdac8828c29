// Command gen writes the dashboards' JSON.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/lockstep-ccl/lockstep/dashboards"
)

func main() {
	out := flag.String("o", "json", "folder to write to")
	flag.Parse()
	if err := write(*out); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func write(dir string) error {
	all, err := dashboards.All()
	if err != nil {
		return err
	}
	for _, d := range all {
		if err := os.WriteFile(filepath.Join(dir, d.UID+".json"), d.JSON, 0o644); err != nil {
			return err
		}
	}
	return nil
}
