// Package evidencepb is the generated code of evidence.proto: what the frames of a
// recording hold. Package replay alone uses it.
package evidencepb

//go:generate sh generate.sh
