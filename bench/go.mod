module github.com/lockstep-ccl/lockstep/bench

go 1.26.0

require (
	github.com/lockstep-ccl/lockstep v0.0.0
	github.com/prometheus/procfs v0.22.0
)

require (
	golang.org/x/sys v0.49.0
	pgregory.net/rapid v1.3.0
)

replace github.com/lockstep-ccl/lockstep => ../
