"""NCCL called directly, as its own tests do: no torch between the call and the library."""
import ctypes

FLOAT, SUM, SYMMETRIC = 7, 0, 1  # ncclFloat32, ncclSum, NCCL_WIN_COLL_SYMMETRIC


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def library():
    """The libnccl that torch has loaded."""
    with open("/proc/self/maps") as f:
        for line in f:
            path = line.split(None, 5)[-1].strip()
            if "libnccl.so" in path:
                return path
    raise RuntimeError("libnccl.so is not in this process's memory map")


class Comm:
    """A communicator of all ranks. share(bytes or None) hands rank 0's bytes to everybody."""

    def __init__(self, rank, size, share):
        self.lib = ctypes.CDLL(library())
        self.lib.ncclGetErrorString.restype = ctypes.c_char_p
        uid = UniqueId()
        if rank == 0:
            self.check("ncclGetUniqueId", ctypes.byref(uid))
        got = share(ctypes.string_at(ctypes.byref(uid), 128) if rank == 0 else None)
        ctypes.memmove(ctypes.byref(uid), got, 128)
        self.comm = ctypes.c_void_p()
        self.lib.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.check("ncclCommInitRank", ctypes.byref(self.comm), size, uid, rank)
        self.lib.ncclAllReduce.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self.lib.ncclMemAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.lib.ncclCommWindowRegister.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]

    def check(self, what, *args):
        code = getattr(self.lib, what)(*args)
        if code:
            raise RuntimeError(f"{what}: {self.lib.ncclGetErrorString(code).decode()}")

    def all_reduce(self, pointer, floats, stream):
        code = self.lib.ncclAllReduce(pointer, pointer, floats, FLOAT, SUM, self.comm, stream)
        if code:
            raise RuntimeError(f"ncclAllReduce: {code}")

    def window(self, size):
        """Memory of a symmetric window."""
        pointer, window = ctypes.c_void_p(), ctypes.c_void_p()
        self.check("ncclMemAlloc", ctypes.byref(pointer), size)
        self.check("ncclCommWindowRegister", self.comm, pointer, size, ctypes.byref(window), SYMMETRIC)
        return pointer
