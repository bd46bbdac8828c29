package diagnosis

import "fmt"

// OffCPU is what a rank's threads, and those of its children (a data loader's workers), waited for
// in about the last second when they did not run, by the kernel's word (eBPF). Shares are of one
// thread's time, summed over the threads of a kind, at most 1; all is 0 where nobody tells.
type OffCPU struct {
	Disk         float32 // in uninterruptible sleep (state D)
	NCCLStarved  float32 // NCCL's own threads (the proxy): runnable, and no CPU ran them
	ChildDisk    float32 // the children's
	ChildStarved float32
	For          WaitFor // what one of those in state D waits for
	Resent       uint32  // TCP segments that its connections sent again in about the last ten seconds
}

// WaitFor is what a thread in uninterruptible sleep waits for, by the kernel's function that it is in.
type WaitFor uint8

const (
	WaitForUnknown WaitFor = iota
	WaitForStorage
	WaitForNFS
	WaitForLustre
	WaitForFUSE
	WaitForCeph
	WaitForGPUDriver
	WaitForLock
	numWaitFors
)

var waitForNames = [numWaitFors]string{"", "local storage", "NFS", "Lustre", "a FUSE file system", "Ceph", "the GPU's driver", "a lock in the kernel"}

func (w WaitFor) String() string {
	if w < numWaitFors {
		return waitForNames[w]
	}
	return ""
}

// Known is w, or WaitForUnknown for a value of a younger program.
func (w WaitFor) Known() WaitFor {
	if w < numWaitFors {
		return w
	}
	return WaitForUnknown
}

const (
	worthTelling     = 0.2 // of a share
	resentWorthwhile = 10  // segments
)

// sentences say what is worth telling of a rank.
func (o *OffCPU) sentences(rank int32) (all []string) {
	waitsFor := ""
	if o.For.Known() != WaitForUnknown {
		waitsFor = ", for " + o.For.String()
	}
	if o.Disk >= worthTelling {
		all = append(all, fmt.Sprintf("threads of rank %d spend %.0f %% of the time in uninterruptible sleep (state D)%s", rank, 100*o.Disk, waitsFor))
	}
	if o.ChildDisk >= worthTelling {
		all = append(all, fmt.Sprintf("children of rank %d (a data loader's workers?) spend %.0f %% of the time in uninterruptible sleep (state D)%s", rank, 100*o.ChildDisk, waitsFor))
	}
	if o.NCCLStarved >= worthTelling {
		all = append(all, fmt.Sprintf("NCCL's own threads of rank %d want to run and are not let for %.0f %% of the time", rank, 100*o.NCCLStarved))
	}
	if o.ChildStarved >= worthTelling {
		all = append(all, fmt.Sprintf("children of rank %d (a data loader's workers?) want to run and are not let for %.0f %% of the time", rank, 100*o.ChildStarved))
	}
	if o.Resent >= resentWorthwhile {
		all = append(all, fmt.Sprintf("TCP connections of rank %d have sent %d segments again in the last ten seconds", rank, o.Resent))
	}
	return all
}

// whyOffCPU adds what a rank's threads wait for.
func (f *finding) whyOffCPU(ev *Evidence, rank int32) {
	for _, s := range ev.Ranks[rank].OffCPU.sentences(rank) {
		f.why("%s", s)
	}
}
