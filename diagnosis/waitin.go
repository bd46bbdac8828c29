package diagnosis

// WaitIn is what a process's first thread waits in, by the system call that it is in: what a
// rank that has made no communicator does.
type WaitIn uint8

const (
	WaitInUnknown WaitIn = iota // it runs, or nobody can tell
	WaitInNetwork               // a socket, or a poll of some files
	WaitInPolling               // asks the kernel again and again, and gets nothing: NCCL's bootstrap does
	WaitInSleep
	WaitInChild
	WaitInPipe
	WaitInLock
	WaitInFile
	numWaitIns
)

var waitInNames = [numWaitIns]string{
	"", "the network (a socket or a poll)", "something that it asks the kernel for again and again", "a sleep of its own", "a child process", "a pipe",
	"a lock, or another of its threads", "a file, or a lock on one",
}

func (w WaitIn) String() string {
	if w < numWaitIns {
		return waitInNames[w]
	}
	return ""
}

// Known is w, or WaitInUnknown for a value of a younger program.
func (w WaitIn) Known() WaitIn {
	if w < numWaitIns {
		return w
	}
	return WaitInUnknown
}

// forOthers reports whether one that waits in w may wait for the job's other ranks: who they are
// is learnt over the network.
func (w WaitIn) forOthers() bool { return w == WaitInNetwork || w == WaitInPolling }

// own reports whether w is something of the process's own, which no other rank ends.
func (w WaitIn) own() bool { return w.Known() > WaitInPolling }
