module github.com/lockstep-ccl/lockstep/bench

go 1.26.0

require (
	github.com/lockstep-ccl/lockstep v0.0.0
	github.com/prometheus/procfs v0.22.0
)

require (
	golang.org/x/sync v0.24.0
	golang.org/x/sys v0.49.0
	pgregory.net/rapid v1.3.0
)

require (
	github.com/klauspost/compress v1.20.1 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

replace github.com/lockstep-ccl/lockstep => ../
