package starting

import (
	"syscall"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// What newer architectures have no number for.
func init() {
	calls[syscall.SYS_POLL] = diagnosis.WaitInNetwork
	calls[syscall.SYS_SELECT] = diagnosis.WaitInNetwork
	calls[syscall.SYS_EPOLL_WAIT] = diagnosis.WaitInNetwork
	calls[syscall.SYS_OPEN] = diagnosis.WaitInFile
	calls[syscall.SYS_PAUSE] = diagnosis.WaitInSleep
}
