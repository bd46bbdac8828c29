// Package pool keeps the books of a job's units (nodes of a cluster, hosts of an
// allocation, slots of a node): which of them work, which stand by, and which are out.
//
// C4 keeps 8 spare hosts for each 128 that a job needs, so that any 128 of 136 are as good
// as any others: a suspect leaves, a spare takes its place, and a unit that was repaired comes
// back through a preflight check, as a spare.
//
//	active ──Take──► suspect ──Return──► probation ──Passed──► spare ──Take (of another)──► active
//	                    ▲                    │
//	                    └──────Failed────────┘
//
// In: a Config, what the scheduler's inventory lists (Sync), and decisions by action id. Out:
// an Answer for each, the same one whenever it is asked for again, and State, which is
// all there is to know. A Pool saves its state before it answers, so who is killed between
// answer and deed asks again and goes on. How much may be out at a time is bounded; when no
// spare is left it says so, and the policy says whether the job is restarted where it is
// or waits.
//
// The package acts on nothing and asks nobody. Time comes from the caller.
package pool
