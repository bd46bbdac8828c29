// Package torch holds the PyTorch programs of the measurements on GPUs, and the one that
// lockstep demo --trainer torch starts, which it takes along.
package torch

import "embed"

// Job is the training job: Script is started by torchrun and knows nothing of Lockstep. FAULT says
// what goes wrong in it (faultjob.py has which), PROGRESS where it writes how far it is.
//
//go:embed faultjob.py model.py
var Job embed.FS

// Script is the job's program.
const Script = "faultjob.py"
