package diagnosis_test

import (
	"flag"
	"os"
	"testing"
)

// TestMain draws the same jobs in every run, so that a change is judged by what it
// changes. make properties draws many more, and other ones each time: what it finds is
// the detectors' rate of error, to be measured (make bench-diagnosis) and mended.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("rapid.seed"); f != nil && f.Value.String() == "0" && os.Getenv("LOCKSTEP_PROPERTIES") == "" {
		if err := f.Value.Set("1"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}
