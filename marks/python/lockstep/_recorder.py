"""A file of marks: a flight recorder without tables, with one writer."""

import atexit
import mmap
import os
import re
import socket
import stat
import struct
import threading
import time

from . import _launchers
from . import _layout as L

_ANCHOR_NS = 5_000_000_000


def _first(names):
    for n in names:
        v = os.environ.get(n)
        if v:
            return v
    return None


def _number(names, fallback):
    v = _first(names)
    if v is None or not re.fullmatch(r"[0-9]{1,8}", v):
        return fallback
    return int(v)


def _label(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].rstrip("-")


def whoami():
    """launcher, job, node, rank, world, local rank and attempt, by the launcher's variables."""
    launcher, rank, world, local, attempt = None, -1, 0, 0, 0
    for name, marks, ranks, worlds, locals_, attempts in _launchers.LAUNCHERS:
        if all(os.environ.get(m) for m in marks):
            launcher = name
            rank, world = _number(ranks, -1), _number(worlds, 0)
            local, attempt = _number(locals_, 0), _number(attempts, 0)
            break
    job = ""
    for prefix, name, but in _launchers.JOBS:
        v = os.environ.get(name)
        if v and v != but:
            job = _label(prefix + v)
            break
    if rank < 0:  # no launcher: started by hand
        rank, world = 0, 1
    return launcher, job or "job", _first(_launchers.NODES) or socket.gethostname(), rank, max(world, rank + 1), local, attempt


def _put_name(b, at, text):
    name = text.encode("utf-8", "replace")[: L.NAME_SIZE - 1]
    b[at : at + len(name)] = name


def _use_dir(directory):
    """Make a directory, and refuse one in which another user could put or swap files."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # a link that leads nowhere, or a file
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        st = os.fstat(fd)
    finally:
        os.close(fd)
    if st.st_mode & stat.S_ISVTX and st.st_uid in (0, os.geteuid()):
        return directory
    if st.st_uid != os.geteuid():
        raise PermissionError(f"directory {directory} is user {st.st_uid}'s: set LOCKSTEP_RUNTIME_DIR")
    if st.st_mode & 0o022:
        raise PermissionError(f"directory {directory} is writable by others: chmod go-w, or set LOCKSTEP_RUNTIME_DIR")
    return directory


def _runtime_dir(given=None):
    """This user's runtime directory, as record.Dir finds it in Go."""
    base = given or os.environ.get("LOCKSTEP_RUNTIME_DIR")
    named = bool(base)
    base = os.path.normpath(base or "/dev/shm/lockstep")
    try:
        st = os.stat(base)
        if not given and st.st_mode & stat.S_ISVTX and st.st_mode & 0o002 and st.st_uid in (0, os.geteuid()):
            return _use_dir(os.path.join(base, str(os.geteuid())))
    except OSError:
        pass
    if named:
        try:
            return _use_dir(base)
        except OSError:
            if given:
                raise
    return _use_dir(f"{base}-{os.geteuid()}")


class Recorder:
    """One process's file of marks. Threads take turns."""

    def __init__(self, directory=None):
        _, job, node, rank, world, local, attempt = whoami()
        directory = _runtime_dir(directory)
        self.pid = os.getpid()
        size = L.HEADER_SIZE + L.MARKS_RING_SLOTS * L.RECORD_SIZE
        tmp = os.path.join(directory, f".new-{self.pid}-{time.monotonic_ns()}")
        fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self.mem = mmap.mmap(fd, size)
            with open(f"/proc/{self.pid}/stat", "rb") as f:
                start = int(f.read().rpartition(b")")[2].split()[19])
            with open("/proc/sys/kernel/random/boot_id") as f:
                boot = bytes.fromhex(f.read().strip().replace("-", ""))
            h = self.mem
            h[L.HEADER_MAGIC : L.HEADER_MAGIC + 8] = b"LOCKSTEP"
            for at, form, value in (
                (L.HEADER_VERSION, "<I", L.LAYOUT_VERSION),
                (L.HEADER_HEADER_SIZE, "<I", L.HEADER_SIZE),
                (L.HEADER_FILE_SIZE, "<Q", size),
                (L.HEADER_RING_SLOTS, "<I", L.MARKS_RING_SLOTS),
                (L.HEADER_PID, "<i", self.pid),
                (L.HEADER_RANK, "<i", rank),
                (L.HEADER_WORLD_SIZE, "<i", world),
                (L.HEADER_LOCAL_RANK, "<i", local),
                (L.HEADER_ATTEMPT, "<I", attempt),
                (L.HEADER_START_TIME, "<Q", start),
                (L.HEADER_CREATED, "<q", time.time_ns()),
            ):
                struct.pack_into(form, h, at, value)
            h[L.HEADER_BOOT_ID : L.HEADER_BOOT_ID + 16] = boot
            _put_name(h, L.HEADER_JOB, job)
            _put_name(h, L.HEADER_NODE, node)
            # Words that a reader loads at any time are stored whole.
            self.words = memoryview(self.mem).cast("Q")
            self.head = 0
            self.anchors = 0
            self.lock = threading.Lock()
            self.order = threading.Lock()
            self.anchor()
            stem = f"{re.sub('[^A-Za-z0-9-]', '_', job)}.{rank}.{self.pid}"
            for i in range(1, 101):
                self.path = os.path.join(directory, f"{stem}.rec" if i == 1 else f"{stem}-{i}.rec")
                try:
                    os.link(tmp, self.path)
                    break
                except FileExistsError:
                    if i == 100:
                        raise
        finally:
            os.unlink(tmp)
            os.close(fd)

    def store(self, at, value):
        """Stores a word after all before it.

        CPUs that reorder stores keep them apart here: what is before the release of a lock
        comes before what is after the next acquisition of one."""
        with self.order:
            pass
        with self.order:
            self.words[at // 8] = value

    def anchor(self):
        best = None
        for _ in range(4):
            before = time.monotonic_ns()
            real = time.time_ns()
            width = time.monotonic_ns() - before
            if best is None or width < best[0]:
                best = (width, before + width // 2, real)
        n = self.anchors + 1
        at = L.HEADER_ANCHORS + (n & 1) * 16
        self.words[(at + L.ANCHOR_MONO) // 8] = best[1]
        self.words[(at + L.ANCHOR_REAL) // 8] = best[2]
        self.store(L.HEADER_ANCHOR_COUNT, n)
        self.anchors, self.anchored = n, best[1]

    def mark(self, code, flags, value):
        # A signal's handler may have interrupted a mark of this very thread: it goes without.
        if not self.lock.acquire(timeout=0.1):
            return
        try:
            now = time.monotonic_ns()
            if now - self.anchored > _ANCHOR_NS:
                self.anchor()
            ticket = self.head
            self.head = ticket + 1
            at = L.HEADER_SIZE + ticket % L.MARKS_RING_SLOTS * L.RECORD_SIZE
            # The head first: a reader waits for the slot of a ticket that was handed out.
            self.words[L.HEADER_HEAD // 8] = self.head
            self.store(at + L.RECORD_SEQ, 1 << 63 | self.head)
            with self.order:  # the claim is seen before any word that it covers
                pass
            m = self.mem
            struct.pack_into("<q", m, at + L.RECORD_MONO, now)
            struct.pack_into("<BBHI", m, at + L.RECORD_KIND, L.KIND_MARK, flags, L.NO_COMM, 0)
            struct.pack_into("<Q", m, at + L.RECORD_OP_SEQ, 0)
            body = at + L.RECORD_BODY
            struct.pack_into("<BBHiQ16x", m, body, code, 0, 0, -1, value & (1 << 64) - 1)
            self.store(at + L.RECORD_SEQ, self.head)
        finally:
            self.lock.release()

    def close(self):
        with self.lock:
            self.store(L.HEADER_CLOSED, 1)
            self.words.release()
            self.mem.close()


_lock = threading.Lock()
_recorder = None
_pid = None  # of the process that tried to make one
_why = None


def _in_child():
    """A thread that is not in the child may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _open():
    global _recorder, _pid, _why
    # A signal's handler may have interrupted the first mark of this very thread: it goes without.
    if _pid is None and _lock.acquire(timeout=0.1):
        try:
            if _pid is None:
                try:
                    if os.environ.get("LOCKSTEP_RECORDER") == "off":
                        raise RuntimeError("LOCKSTEP_RECORDER is off")
                    _recorder = Recorder()
                    atexit.register(close)
                except Exception as e:  # the program matters more
                    _why = f"{type(e).__name__}: {e}"
                _pid = os.getpid()
        finally:
            _lock.release()
    return _recorder is not None and _pid == os.getpid()


def mark(code, flags, value):
    global _recorder, _why
    if not _open():
        return
    try:
        _recorder.mark(code, flags, value)
    except Exception as e:
        _why = f"{type(e).__name__}: {e}"
        _recorder = None


def step(n):
    try:
        n = int(n)
        if not 0 <= n < 1 << 64:
            raise ValueError(f"step {n}: want a number from 0")
    except Exception as e:
        because(e)
        return
    mark(L.MARK_STEP, 0, n)


def path():
    """The file of marks, which is made when there is none yet; None when there can be none."""
    return _recorder.path if _open() else None


def because(e):
    global _why
    _why = f"{type(e).__name__}: {e}"


def why():
    return _why


def close():
    global _recorder
    if _recorder is not None and _pid == os.getpid():
        r, _recorder = _recorder, None
        r.close()
