// Command gen writes the rules file for the default thresholds.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"

	"github.com/lockstep-ccl/lockstep/rules"
)

func main() {
	out := flag.String("o", "lockstep.rules.yaml", "file to write")
	flag.Parse()
	var b bytes.Buffer
	err := rules.Generate(&b, rules.DefaultConfig())
	if err == nil {
		err = os.WriteFile(*out, b.Bytes(), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}
