"""One rank of measure.py; not to be started by hand."""
import glob
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recorder import Recorder

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dev = torch.device("cuda")
issued = 0


def count(n=1):
    global issued
    issued += n


def recorder():
    """This process's own recorder, None where the plugin is off."""
    found = glob.glob(os.path.join(os.environ["LOCKSTEP_RUNTIME_DIR"], f"*.{rank}.{os.getpid()}.rec"))
    return Recorder(found[0]) if found else None


class AllReduceForward(torch.autograd.Function):
    """A row-parallel layer's: partial sums are added up."""

    @staticmethod
    def forward(ctx, x, group):
        count()
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class AllReduceBackward(torch.autograd.Function):
    """A column-parallel layer's: its input's gradients are added up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, g):
        count()
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Model(torch.nn.Module):
    """Layers of a transformer's MLP, split over the tensor-parallel group."""

    def __init__(self, group, width=1024, layers=4):
        super().__init__()
        n = dist.get_world_size(group)
        self.group = group
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, 4 * width // n) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(4 * width // n, width) for _ in range(layers))

    def forward(self, x):
        for up, down in zip(self.up, self.down):
            h = torch.nn.functional.gelu(up(AllReduceBackward.apply(x, self.group)))
            x = x + AllReduceForward.apply(down(h), self.group)
        return x


def trainer(tp):
    """DDP over everything, tensor parallel over tp: returns a function that makes one step."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(Model(tp).to(dev), bucket_cap_mb=4)

    def hook(_, bucket):  # DDP's own, counted
        count()
        return dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(None, hook)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(32, 1024, device=dev)

    def step():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    return step


def settle():
    torch.cuda.synchronize()
    time.sleep(0.5)  # the plugin's helper: ends that nobody tells


def section(name, play):
    """Plays something and compares what was issued with what the recorder has."""
    global issued
    r = recorder()
    settle()
    issued = 0
    before = {c["id"]: c["enqueued"] for c in r.comms()}
    since, lost = r.counters()["appended"], r.counters()["ops_lost"]
    play()
    settle()
    now = r.comms()
    _, counts = r.durations(since)
    return {"section": name, "issued": issued, "numbered": sum(c["enqueued"] - before.get(c["id"], 0) for c in now),
            "open": sum(c["enqueued"] - c["finished"] for c in now), "lost": r.counters()["ops_lost"] - lost, **counts}


def accounting(tp):
    step = trainer(tp)
    for _ in range(5):
        step()

    def train():
        for _ in range(200):
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
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(5):
                dist.all_reduce(x)

    def replays():
        for _ in range(100):
            graph.replay()
            count(5)

    alltoall(), messages()  # connections are made before what is counted
    return [section("DDP + TP, 200 steps", train), section("5 kinds", kinds), section("all_to_all", alltoall),
            section("send/recv", messages), section("CUDA graph", replays)]


def durations():
    """Each all-reduce by the plugin's stamps and by CUDA events around it."""
    r, rows = recorder(), []
    for size in [8, 4096, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30]:
        x = torch.ones(max(size // 4, 2), device=dev)
        n = 200 if size <= 1 << 26 else 20
        for _ in range(5):
            dist.all_reduce(x)
        settle()
        since = r.counters()["appended"]
        pairs = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            dist.all_reduce(x)
            b.record()
            pairs.append((a, b))
            torch.cuda.synchronize()
        settle()
        ours = [t[4] / 1e3 for t in r.durations(since)[0]]
        theirs = [a.elapsed_time(b) * 1e3 for a, b in pairs]
        if len(ours) == n:
            err = sorted(t - o for o, t in zip(ours, theirs))
            rows.append({"size": size, "ours_us": statistics.median(ours), "events_us": statistics.median(theirs),
                         "err_median_us": err[n // 2], "err_p99_us": err[n * 99 // 100]})
        else:
            rows.append({"size": size, "missing": n - len(ours)})
        del x
    return rows


def speed(tp):
    """Time of an all-reduce by size, many queued, and steps a second."""
    out = {}
    for size in [8, 4096, 1 << 17, 1 << 19, 1 << 21, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30]:
        x = torch.ones(max(size // 4, 2), device=dev)
        n, best = (500, []) if size <= 1 << 22 else (20, [])
        for k in range(7):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            at = time.perf_counter()
            for _ in range(n):
                dist.all_reduce(x)
            torch.cuda.synchronize()
            if k:
                best.append((time.perf_counter() - at) / n * 1e6)
        out[str(size)] = statistics.median(best)
        del x
    step = trainer(tp)
    rates = []
    for k in range(6):
        torch.cuda.synchronize()
        at = time.perf_counter()
        for _ in range(100):
            step()
        torch.cuda.synchronize()
        if k:
            rates.append(100 / (time.perf_counter() - at))
    out["steps"] = statistics.median(rates)
    return out


dist.init_process_group("nccl", device_id=dev)
tp_group = dist.new_group(list(range(world)))
what = sys.argv[1]
result = {"accounting": accounting, "speed": speed}[what](tp_group) if what != "durations" else durations()
reader = recorder()
extra = {"counters": reader.counters(), "conns": reader.conns()} if reader else {}
if rank == 0:
    print("RESULT " + json.dumps({"result": result, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "torch": torch.__version__, **extra}), flush=True)
dist.barrier()
dist.destroy_process_group()
