//go:build race

package ccl_test

const raceEnabled = true
