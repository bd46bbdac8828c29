// Package ccltest breaks a job on purpose: it stalls, throttles or cuts
// connections and delays a rank, inside the real transports of a running
// process, so that what watches the job can be seen at work.
//
// An Injector goes into ccl.Config.Faults and costs nothing while it holds no
// fault. Serve lets another process (the demo, a test) reach it by a Unix socket.
// It is for tests and drills: a job that nobody means to break has no Injector.
package ccltest

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
)

// Injector holds the faults of one process's rank. Its methods are safe for
// concurrent use; a change takes effect with the next operation or poll.
type Injector struct {
	version atomic.Uint64
	mu      sync.RWMutex
	conns   map[conn]transport.Fault
	delay   time.Duration
}

// conn names a directed connection by communicator ranks; comm "" is any.
type conn struct {
	comm     string
	src, dst int
}

// New returns an Injector without faults.
func New() *Injector { return &Injector{conns: map[conn]transport.Fault{}} }

// Stall takes src's bytes to dst in the named communicator ("" for any) and
// delivers none of them until Clear. src must be this process's rank.
func (i *Injector) Stall(comm string, src, dst int) {
	i.set(comm, src, dst, transport.Fault{Stall: true})
}

// Throttle delivers at most bytesPerSecond.
func (i *Injector) Throttle(comm string, src, dst int, bytesPerSecond int64) {
	i.set(comm, src, dst, transport.Fault{BytesPerSecond: bytesPerSecond})
}

// Delay delivers each chunk later by d.
func (i *Injector) Delay(comm string, src, dst int, d time.Duration) {
	i.set(comm, src, dst, transport.Fault{Delay: d})
}

// Drop cuts the pair's connection for good, for both sides.
func (i *Injector) Drop(comm string, src, dst int) {
	i.set(comm, src, dst, transport.Fault{Drop: true})
}

// DelayRank makes the rank enter each collective later by d. On device memory a
// kernel that keeps every multiprocessor of the rank's GPU busy sees to it, before
// each operation.
func (i *Injector) DelayRank(d time.Duration) {
	i.mu.Lock()
	i.delay = d
	i.mu.Unlock()
	i.version.Add(1)
}

// Clear removes every fault. What was dropped stays dropped.
func (i *Injector) Clear() {
	i.mu.Lock()
	clear(i.conns)
	i.delay = 0
	i.mu.Unlock()
	i.version.Add(1)
}

func (i *Injector) set(comm string, src, dst int, f transport.Fault) {
	i.mu.Lock()
	i.conns[conn{comm, src, dst}] = f
	i.mu.Unlock()
	i.version.Add(1)
}

// Version implements transport.Faults.
func (i *Injector) Version() uint64 { return i.version.Load() }

// Conn implements transport.Faults. A fault of the named communicator goes before one of any.
func (i *Injector) Conn(comm string, src, dst int) transport.Fault {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if f, ok := i.conns[conn{comm, src, dst}]; ok {
		return f
	}
	return i.conns[conn{"", src, dst}]
}

// Entry implements transport.Faults.
func (i *Injector) Entry(string) time.Duration {
	i.mu.RLock()
	defer i.mu.RUnlock()
	return i.delay
}
