// Package slurm restarts jobs of a Slurm cluster, with or without the node of the rank to
// blame, through Slurm's own commands: scontrol, scancel, squeue, sinfo, sattach.
//
// Two ways lead to a running job. Inside the allocation, when the batch script is a Loop
// (`lockstep slurm run`) with nodes to spare: the job's step ends, the next one leaves the
// bad node out; no queue, no privilege, tenths of a second. Else by requeue, with the node
// in the job's list of excluded ones and a start time two seconds ahead.
//
//	Actuator  actions → journal → commands
//	marker    what actuator and loop tell each other, in the job's comment: it needs no
//	          shared disk, and the job's owner may write it
//	Loop      marker → srun, again and again
//
// Every step is level-triggered: the actuator looks at what Slurm says now, does what is
// missing, and looks again, so that a repeat, a remediator that was killed and a slurmctld
// that has forgotten the last seconds lead to the same end. What must be known to recognise
// a repeat is in a journal of its own before anything is done.
//
// It acts on no job that it does not know: one of a user whom its options name, by id or by
// a name that only one job has. Nothing goes through a shell, and what comes from outside
// is checked before it becomes an argument.
package slurm
