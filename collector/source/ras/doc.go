// Package ras asks NCCL's RAS, the port on which NCCL's processes of a job answer
// for all of them (localhost:28028 by default), who is missing and who has launched
// less than others. It is second evidence, beside what flight recorders say: counts
// are of launches, not of completions, and RAS has called jobs well that hung.
//
// An answer costs NCCL a round through all processes of the job. So RAS is asked
// only while a rank of this node is held up, by few nodes of a job, and not often.
//
// In flow answers in JSON (NCCL 2.28.7 and later) or text (2.24 and later), which are
// foreign bytes: what is read and kept of them is bounded, what is not understood is
// passed over. Out flows collector.RAS, in the view. The package judges nothing.
package ras
