//go:build !cgo

package verbs

import (
	"errors"
	"syscall"
	"unsafe"
)

type handle = unsafe.Pointer

// Without cgo no library is ever loaded, so that nothing below it is reached.
func load(string) error {
	return errors.New("this binary was built without cgo (CGO_ENABLED=1 and a C compiler are needed)")
}

const none = syscall.ENOSYS

func listDevices() ([]Device, syscall.Errno)                        { return nil, none }
func openDevice(string) (handle, bool, syscall.Errno)               { return nil, false, none }
func closeDevice(handle) syscall.Errno                              { return none }
func queryDevice(handle, *DeviceAttr) syscall.Errno                 { return none }
func queryPort(handle, int, *PortAttr) syscall.Errno                { return none }
func queryGIDTable(handle, int) ([]GIDEntry, []int, syscall.Errno)  { return nil, nil, none }
func queryGID(handle, int, int, *GID) syscall.Errno                 { return none }
func asyncFD(handle) int                                            { return -1 }
func nextEvent(handle, *Event) syscall.Errno                        { return none }
func allocPD(handle) (handle, syscall.Errno)                        { return nil, none }
func deallocPD(handle) syscall.Errno                                { return none }
func registerMR(handle, *MR, Access) syscall.Errno                  { return none }
func registerDMABuf(handle, *MR, int, uint64, Access) syscall.Errno { return none }
func deregisterMR(handle) syscall.Errno                             { return none }
func createChannel(handle) (handle, syscall.Errno)                  { return nil, none }
func channelFD(handle) int                                          { return -1 }
func drainChannel(handle) (int, syscall.Errno)                      { return 0, none }
func destroyChannel(handle) syscall.Errno                           { return none }
func createCQ(handle, *CQ, int, handle) syscall.Errno               { return none }
func pollCQ(handle, []Completion) int                               { return -int(none) }
func armCQ(handle) syscall.Errno                                    { return none }
func destroyCQ(handle) syscall.Errno                                { return none }
func createQP(handle, *QP) syscall.Errno                            { return none }
func modifyInit(handle, int, Access) syscall.Errno                  { return none }
func modifyRTR(handle, int, *Path) syscall.Errno                    { return none }
func modifyRTS(handle, *SendAttr) syscall.Errno                     { return none }
func modifyError(handle) syscall.Errno                              { return none }
func queryQP(handle) (QPState, syscall.Errno)                       { return 0, none }
func postWrites(handle, []Write) (int, syscall.Errno)               { return 0, none }
func postReceives(handle, uint64, int) (int, syscall.Errno)         { return 0, none }
func destroyQP(handle) syscall.Errno                                { return none }
