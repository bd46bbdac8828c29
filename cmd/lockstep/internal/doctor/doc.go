// Package doctor is `lockstep doctor`: what this node has of what Lockstep can use,
// what works without the rest, and what to do about it.
//
// In flow the node's own files (/proc, /sys, /dev) and a few questions to its kernel
// and driver, each with a bound; out flows one finding for each ability, as text or
// JSON. It changes nothing, needs no privilege, and asks nothing of other machines.
// Checks are rows of a table: a new one is a function and a row.
package doctor
