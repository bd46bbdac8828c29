// Package planpb is the planner's API: the messages of plan.proto.
package planpb

//go:generate ./generate.sh
