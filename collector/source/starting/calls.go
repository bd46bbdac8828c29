package starting

import (
	"syscall"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// calls are the system calls in which a process waits, by number: what for.
var calls = map[int]wait{
	syscall.SYS_READ:            onFile,
	syscall.SYS_WRITE:           onFile,
	syscall.SYS_READV:           onFile,
	syscall.SYS_WRITEV:          onFile,
	syscall.SYS_PREAD64:         onFile,
	syscall.SYS_PWRITE64:        onFile,
	syscall.SYS_FSYNC:           diagnosis.WaitInFile,
	syscall.SYS_FDATASYNC:       diagnosis.WaitInFile,
	syscall.SYS_FLOCK:           diagnosis.WaitInFile,
	syscall.SYS_FCNTL:           diagnosis.WaitInFile,
	syscall.SYS_OPENAT:          diagnosis.WaitInFile,
	syscall.SYS_NANOSLEEP:       diagnosis.WaitInSleep,
	syscall.SYS_CLOCK_NANOSLEEP: diagnosis.WaitInSleep,
	syscall.SYS_FUTEX:           diagnosis.WaitInLock,
	syscall.SYS_WAIT4:           diagnosis.WaitInChild,
	syscall.SYS_WAITID:          diagnosis.WaitInChild,
	syscall.SYS_RECVFROM:        diagnosis.WaitInNetwork,
	syscall.SYS_RECVMSG:         diagnosis.WaitInNetwork,
	syscall.SYS_SENDTO:          diagnosis.WaitInNetwork,
	syscall.SYS_SENDMSG:         diagnosis.WaitInNetwork,
	syscall.SYS_CONNECT:         diagnosis.WaitInNetwork,
	syscall.SYS_ACCEPT:          diagnosis.WaitInNetwork,
	syscall.SYS_ACCEPT4:         diagnosis.WaitInNetwork,
	syscall.SYS_PPOLL:           diagnosis.WaitInNetwork,
	syscall.SYS_PSELECT6:        diagnosis.WaitInNetwork,
	syscall.SYS_EPOLL_PWAIT:     diagnosis.WaitInNetwork,
}
