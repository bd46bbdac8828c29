package ebpf

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strconv"
)

const (
	// maxComm is how much of NCCL's own structure of a communicator is looked at, bytes.
	maxComm = 512 << 10
	// maxPlaces bounds the places of a library that may hold rank and size.
	maxPlaces = 4096
)

// places are where in a library's structure of a communicator rank and size may stand, one after the
// other. No version's layout is written down here: of a communicator made from a unique id both are
// known, so that the places that hold them are found, and of several communicators those that all have.
// What ncclCommSplit made has its own there.
type places map[int]bool

// learnFrom takes in one communicator of which rank and size are known.
func (p places) learnFrom(memory []byte, rank, size int32) places {
	if size < 2 {
		return p // too likely to be anything
	}
	if p == nil {
		p = places{}
		for at := 0; at+8 <= len(memory) && len(p) < maxPlaces; at += 4 {
			if pair(memory, at) == [2]int32{rank, size} {
				p[at] = true
			}
		}
		return p
	}
	for at := range p {
		if at+8 > len(memory) || pair(memory, at) != [2]int32{rank, size} {
			delete(p, at)
		}
	}
	return p
}

// read finds rank and size of a communicator that was split from one of the given size. They
// are known when all places say the same.
func (p places) read(memory []byte, parent int32) (rank, size int32, ok bool) {
	for at := range p {
		if at+8 > len(memory) {
			return 0, 0, false
		}
		x := pair(memory, at)
		if ok && x != [2]int32{rank, size} || x[0] < 0 || x[0] >= x[1] || x[1] > parent {
			return 0, 0, false
		}
		rank, size, ok = x[0], x[1], true
	}
	return rank, size, ok
}

func pair(memory []byte, at int) [2]int32 {
	return [2]int32{int32(binary.LittleEndian.Uint32(memory[at:])), int32(binary.LittleEndian.Uint32(memory[at+4:]))}
}

// readMemory reads a process's memory from an address on, as far as it goes. It takes
// CAP_SYS_PTRACE, or the process's own user.
func readMemory(proc string, pid int, address uint64) []byte {
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(pid), "mem"))
	if err != nil {
		return nil
	}
	defer f.Close()
	b := make([]byte, maxComm)
	n, _ := f.ReadAt(b, int64(address)) // to the end of what is mapped
	return b[:n]
}

// looked is what a communicator's memory was looked at for.
type looked struct {
	created    uint64
	rank, size int32 // of one that was split from another, -1 while they are not known
	at         int64 // when
	times      int
}

const (
	// lookAgain is the time between two looks at a communicator's memory, ns; there are maxLooks.
	lookAgain = int64(1e9)
	maxLooks  = 10
)

// learn learns from a communicator made from a unique id where its rank and size stand, and
// fills them in for one that was split from such a one.
func (s *Source) learn(r *rank, e *entry, now int64) {
	known := s.scanner.known[r.pid]
	split := e.Parent != 0 && e.Id != 0 && e.Size < 0
	if known == nil || e.State != stateJoined && !split || e.Parent == 0 && !e.identified() {
		return
	}
	l := r.looked[e.key.Comm]
	if l == nil || l.created != e.Created {
		l = &looked{created: e.Created, rank: -1, size: -1, at: now - lookAgain}
		r.looked[e.key.Comm] = l
	}
	if !split {
		if l.times == 0 {
			l.times++
			s.places[known.library] = s.places[known.library].learnFrom(readMemory(s.o.Proc, r.pid, e.key.Comm), e.Rank, e.Size)
		}
		return
	}
	if parent := r.comms[e.Parent]; l.size < 0 && parent != nil && e.State == stateJoined && now-l.at >= lookAgain && l.times < maxLooks {
		l.at, l.times = now, l.times+1
		if rank, size, ok := s.places[known.library].read(readMemory(s.o.Proc, r.pid, e.key.Comm), parent.size); ok {
			l.rank, l.size = rank, size
		}
	}
	if l.size > 0 {
		e.Rank, e.Size = l.rank, l.size
	}
}
