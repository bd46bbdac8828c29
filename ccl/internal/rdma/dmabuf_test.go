package rdma

import (
	"bytes"
	"errors"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
	"golang.org/x/sys/unix"
)

// dmaBuf is a region whose bytes are those of a file, which stands for a GPU's memory.
func dmaBuf(t *testing.T, n int) (mem []byte, r *Region) {
	t.Helper()
	fd, err := unix.MemfdCreate("dmabuf", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		t.Fatal(err)
	}
	if mem, err = unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	if r, err = RegisterDMABuf(fd, n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(r.Close(), unix.Munmap(mem)); err != nil {
			t.Error(err)
		}
	})
	return mem, r
}

// ports are an end's.
func (e *end) ports() []nic.Port { return []nic.Port{e.pairs[0].Own, e.pairs[1].Own} }

// TestDMABuf: whatever is sent of a DMA buffer, however short, goes from where it lies, and
// over the other path when one breaks; the peer tells what it has consumed of it.
func TestDMABuf(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	mem, region := dmaBuf(t, 1<<20)
	if err := a.w.Need(region, a.ports()); err != nil {
		t.Fatal(err)
	}
	names := region.Bytes()
	if len(names) != len(mem) || region.addr%dmaAlign != 0 || regionOf(names[5:]) != region {
		t.Fatalf("%d bytes at %#x stand for %d", len(names), region.addr, len(mem))
	}
	func() {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() {
			if recover() == nil {
				t.Error("the CPU reads a DMA buffer")
			}
		}()
		_ = bytes.Count(names, []byte{0})
	}()
	inbox := make([]byte, len(mem))
	before := SentDMABuf()
	total := 0
	for round, size := range []int{1, 64, 200, 1000, 70_000, 1 << 20, 333_333, 17} {
		for i := range mem[:size] {
			mem[i] = byte(i>>8) + byte(3*i) + byte(round)
		}
		if round == 5 {
			f.Link("mlx5_0", 1, "mlx5_2", 1).TearNext(1)
			f.Link("mlx5_0", 1, "mlx5_2", 1).Freeze()
		}
		a.AlignSend()
		b.AlignRecv()
		total += size
		sent, got := 0, 0
		for deadline := time.Now().Add(patience); got < size || !a.Settled(); {
			n, _, err := a.SendKept(names[sent:size])
			if err != nil {
				t.Fatal(err)
			}
			sent += n
			k, err := b.Recv(inbox[got:size])
			if err != nil {
				t.Fatal(err)
			}
			if got += k; got == size {
				b.Acknowledge() // and nothing more: who is done does not look again
			}
			if n+k == 0 {
				a.wait()
				if got < size {
					b.Refresh()
				}
			}
			if time.Now().After(deadline) {
				t.Fatalf("sent %d, received %d of %d, settled %v\n%s%s", sent, got, size, a.Settled(), a.dump(), b.dump())
			}
		}
		if !bytes.Equal(inbox[:size], mem[:size]) {
			t.Fatalf("%d bytes are wrong", size)
		}
		clear(mem) // as it may be
	}
	if n := SentDMABuf() - before; n != uint64(total) {
		t.Errorf("%d of %d bytes were sent from where they lay", n, total)
	}
	if a.switches.Load() == 0 || a.resent.Load() == 0 {
		t.Error("nothing was sent again")
	}
}

// TestDMABufRefused: a device that does not take the memory, from the start or when it
// comes back, is no path; nor is the next one, when it refuses, too.
func TestDMABufRefused(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	until(t, "a connection", a, b, func() bool { return on(0, a, b) })
	_, region := dmaBuf(t, 64<<10)
	f.Fail("ibv_reg_dmabuf_mr", unix.ENOMEM, 2)
	if err := a.w.Need(region, a.ports()); err == nil || !strings.Contains(err.Error(), "mlx5_1 refuses the GPU's memory") {
		t.Fatalf("the second device refuses: %v", err)
	}
	if len(a.w.needs) != 0 {
		t.Error("memory is needed that was refused")
	}
	mem, region := dmaBuf(t, 64<<10)
	if err := a.w.Need(region, a.ports()); err != nil {
		t.Fatal(err)
	}
	send := func(what string) {
		t.Helper()
		n, got := 0, make([]byte, len(mem))
		until(t, what, a, b, func() bool {
			k, _, err := a.SendKept(region.Bytes()[n:])
			if n += k; err != nil {
				t.Fatal(err)
			}
			a.Refresh()
			b.Refresh()
			return n == len(mem)
		})
		until(t, what, a, b, func() bool {
			k, err := b.Recv(got[:n])
			if n -= k; err != nil {
				t.Fatal(err)
			}
			a.Refresh()
			b.Refresh()
			return n == 0
		})
	}
	send("a device that takes the memory")
	f.Remove("mlx5_0")
	send("the backup")
	f.Fail("ibv_reg_dmabuf_mr", unix.ENOMEM, 0)
	f.Restore("mlx5_0")
	until(t, "a try", a, b, func() bool {
		a.w.mu.Lock()
		defer a.w.mu.Unlock()
		return a.why != nil && strings.Contains(a.why.Error(), "mlx5_0 refuses the GPU's memory") && a.tries[0][0].failures > 1
	})
	send("the backup, while the device refuses")
	a.w.mu.Lock()
	for i := range a.qps {
		if q := a.qps[i][0]; q != nil {
			t.Errorf("lane %d has a queue pair on the device that refuses", i)
		}
	}
	a.w.mu.Unlock()
	// No path is left: that says what there would have been.
	f.SetPort("mlx5_1", 1, false, true)
	var err error
	until(t, "the end", a, b, func() bool {
		_, _, err = a.SendKept(region.Bytes())
		a.Refresh()
		b.Refresh()
		return err != nil
	})
	if !errors.Is(err, ErrNoPath) {
		t.Errorf("without a path: %v", err)
	}
}

// TestDMABufOver: memory that is freed is needed no more.
func TestDMABufOver(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	_, region := dmaBuf(t, 4096)
	if err := a.w.Need(region, a.ports()); err != nil {
		t.Fatal(err)
	}
	if err := region.Close(); err != nil {
		t.Fatal(err)
	}
	f.Remove("mlx5_0")
	until(t, "the backup", a, b, func() bool {
		a.w.mu.Lock()
		defer a.w.mu.Unlock()
		return a.m.lanes[0].active == 1
	})
	f.Restore("mlx5_0")
	until(t, "the primary", a, b, func() bool { return on(0, a, b) })
	if err := region.Close(); err != nil {
		t.Errorf("once more: %v", err)
	}
	for _, n := range []int{0, -1} {
		if _, err := RegisterDMABuf(0, n); err == nil {
			t.Errorf("a DMA buffer of %d bytes", n)
		}
	}
	if _, err := RegisterDMABuf(-1, 1); err == nil {
		t.Error("a DMA buffer of no descriptor")
	}
}
