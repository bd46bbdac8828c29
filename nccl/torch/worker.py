"""One rank of measure.py; not to be started by hand."""
import glob
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import model
from model import count, trainer
from rawnccl import Comm
from recorder import Recorder

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dev = torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def recorder():
    """This process's own recorder, None where the plugin is off."""
    found = glob.glob(os.path.join(os.environ["LOCKSTEP_RUNTIME_DIR"], f"*.{rank}.{os.getpid()}.rec"))
    return Recorder(found[0]) if found else None


def raw_comm():
    store = dist.distributed_c10d._get_default_store()

    def share(mine):
        if mine is not None:
            store.set("raw", mine.hex())
        return bytes.fromhex(store.get("raw").decode())

    return Comm(rank, world, share)


SETTLE = 10  # seconds, at most


def unfinished(r):
    return sum(c["enqueued"] - c["finished"] for c in r.comms())


def settle():
    """Waits until all that was called is over in the recorder too: ends that NCCL does not tell come from the plugin's helper."""
    torch.cuda.synchronize()
    r, until = recorder(), time.time() + SETTLE
    while r and unfinished(r) and time.time() < until:
        time.sleep(0.02)


def section(name, play, chunks=1):
    """Plays something, in parts that the ring holds, and compares what was issued with what the recorder has."""
    r = recorder()
    settle()
    model.issued = 0
    before = {c["id"]: c["enqueued"] for c in r.comms()}
    lost, sums = r.counters()["ops_lost"], {}
    for _ in range(chunks):
        since = r.counters()["appended"]
        play()
        settle()
        for k, v in r.durations(since)[1].items():
            sums[k] = sums.get(k, 0) + v
    now = r.comms()
    return {"section": name, "issued": model.issued, "numbered": sum(c["enqueued"] - before.get(c["id"], 0) for c in now),
            "open": unfinished(r), "lost": r.counters()["ops_lost"] - lost, **sums}


def accounting(tp, steps):
    step = trainer(tp, dev)
    for _ in range(5):
        step()

    def train():
        for _ in range(100):
            step()

    x = torch.ones(1 << 18, device=dev)

    def kinds():
        part, whole = torch.ones(1 << 10, device=dev), torch.ones(world << 10, device=dev)
        for _ in range(100):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            count(5)

    def alltoall():
        a, b = torch.ones(world << 10, device=dev), torch.empty(world << 10, device=dev)
        for _ in range(100):
            dist.all_to_all_single(b, a)
            count()

    def messages():
        a, b = torch.ones(1 << 16, device=dev), torch.empty(1 << 16, device=dev)
        for _ in range(100):
            ops = [dist.P2POp(dist.isend, a, (rank + 1) % world), dist.P2POp(dist.irecv, b, (rank - 1) % world)]
            for w in dist.batch_isend_irecv(ops):
                w.wait()
            count()

    # Captured calls are not operations: the replays are.
    def graph_of(calls):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            dist.all_reduce(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(calls):
                    dist.all_reduce(x)
        return graph

    def replays():
        for _ in range(100):
            graph.replay()
            count(5)

    def symmetric():
        stream = torch.cuda.current_stream().cuda_stream
        for k in range(100):
            raw.all_reduce(memory, 1 << (k % 16), stream)
            count()

    def direct():
        stream = torch.cuda.current_stream().cuda_stream
        for k in range(100):
            raw.all_reduce(x.data_ptr(), 1 << (k % 16), stream)
            count()

    alltoall(), messages()  # connections are made before what is counted
    out = [section(f"DDP + TP, {steps} steps", train, steps // 100), section("5 kinds", kinds), section("all_to_all", alltoall),
           section("send/recv", messages)]
    # What a version of torch or NCCL may not have costs its own line only.
    try:
        graph = graph_of(5)
        out.append(section("CUDA graph", replays))
        torch.cuda.synchronize()
    except Exception as e:
        out.append({"section": "CUDA graph", "failed": str(e)})
    try:
        raw = raw_comm()
        out.append(section("NCCL called directly", direct))
        memory = raw.window(1 << 20)
        out.append(section("symmetric window", symmetric))
    except Exception as e:
        out.append({"section": "symmetric window", "failed": str(e)})
    return out


def beside_events(r, stream, n, call):
    """Operations by the plugin's stamps and by CUDA events around them, in the same order."""
    pairs = []
    with torch.cuda.stream(stream):
        for _ in range(5):
            call()
        settle()
        since = r.counters()["appended"]
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(400_000)  # all three are queued before the first begins: launching is not what is compared
            a.record()
            call()
            b.record()
            pairs.append((a, b))
            torch.cuda.synchronize()
        settle()
    ours = [t[4] / 1e3 for t in r.durations(since)[0]]
    theirs = [a.elapsed_time(b) * 1e3 for a, b in pairs]
    if len(ours) != n:
        return {"missing": n - len(ours)}
    err = sorted(t - o for o, t in zip(ours, theirs))
    return {"ours_us": statistics.median(ours), "events_us": statistics.median(theirs),
            "err_least_us": err[0], "err_median_us": err[n // 2], "err_p99_us": err[n * 99 // 100]}


def durations():
    """Each all-reduce by the plugin's stamps and by CUDA events around it: called directly, on the
    events' own stream, and through torch, whose group has another stream."""
    r, rows, raw = recorder(), [], raw_comm()
    stream = torch.cuda.Stream()
    for way in ("direct", "torch"):
        for size in [8, 4096, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30]:
            x = torch.ones(max(size // 4, 2), device=dev)
            call = (lambda: raw.all_reduce(x.data_ptr(), x.numel(), stream.cuda_stream)) if way == "direct" else (lambda: dist.all_reduce(x))
            rows.append({"way": way, "size": size, **beside_events(r, stream, 400 if size <= 1 << 26 else 40, call)})
            del x
    return rows


def selfsend():
    """The same on one communicator before and after all-to-alls, a part of which goes to the rank itself: small ones, and large ones."""
    r, rows, stream = recorder(), [], torch.cuda.Stream()
    for part in (0, 1 << 12, 1 << 22):
        if part:
            a, b = torch.ones(world * part // 4, device=dev), torch.empty(world * part // 4, device=dev)
            for _ in range(100):
                dist.all_to_all_single(b, a)
            settle()
        for size in (4096, 1 << 20):
            x = torch.ones(size // 4, device=dev)
            rows.append({"part": part, "size": size, "open": unfinished(r), **beside_events(r, stream, 100, lambda: dist.all_reduce(x))})
    return rows


def turns(tp):
    """Does what measure.py says, a line at a time, while the ranks of other modes wait: so modes are compared in turn."""
    raw = raw_comm()
    step = trainer(tp, dev)
    stream = torch.cuda.Stream()
    x = torch.ones(1 << 28, device=dev)

    def timed(n, call, once=None):
        dist.barrier()
        torch.cuda.synchronize()
        at = time.perf_counter()
        if once:
            once()
        else:
            for _ in range(n):
                call()
        called = time.perf_counter() - at
        torch.cuda.synchronize()
        return {"calls_us": called / n * 1e6, "us": (time.perf_counter() - at) / n * 1e6}

    for _ in range(20):
        step()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[(2 + 4 * rank) % len(cpus)]})  # this thread alone; modes take turns on the same core
    answer = (lambda a: print("ANSWER " + json.dumps(a), flush=True)) if rank == 0 else lambda a: None
    answer({"nccl": ".".join(map(str, torch.cuda.nccl.version())), "torch": torch.__version__})
    for line in sys.stdin:
        what, size, n = line.split()
        size, n = int(size), int(n)
        if what == "end":
            break
        if what == "raw":
            pointer, floats, on = x.data_ptr(), max(size // 4, 2), stream.cuda_stream
            got = timed(n, None, lambda: raw.all_reduces(n, pointer, floats, on))
        elif what == "torch":
            y = x[:max(size // 4, 2)]
            got = timed(n, lambda: dist.all_reduce(y))
        else:
            got = timed(n, step)
        answer(got)


dist.init_process_group("nccl", device_id=dev)
tp_group = dist.new_group(list(range(world)))
what = sys.argv[1]
if what == "accounting":
    result = accounting(tp_group, int(os.environ.get("MEASURE_STEPS", "2000")))
elif what == "durations":
    result = durations()
elif what == "selfsend":
    result = selfsend()
else:
    result = turns(tp_group)
reader = recorder()
extra = {"counters": reader.counters(), "conns": reader.conns(), "comms": reader.comms()} if reader else {}
if rank == 0:
    print("RESULT " + json.dumps({"result": result, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "torch": torch.__version__, **extra}), flush=True)
dist.barrier()
dist.destroy_process_group()
