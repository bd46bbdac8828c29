"""A training job in which something breaks: what faults.py and lockstep demo --trainer torch start under lockstep attach.

It knows nothing of Lockstep: an unmodified PyTorch script. FAULT says what breaks in step FAULT_STEP of rank FAULT_RANK.
FAULTS names a folder in place of these, in which lockstep demo orders faults while the job runs. Checkpoints and losses
are beside PROGRESS. BACKEND=gloo runs it without GPUs.
"""
import copy
import faulthandler
import os
import re
import signal
import time

import torch
import torch.distributed as dist

from model import trainer

fault, at = os.environ.get("FAULT", ""), int(os.environ.get("FAULT_STEP", "400"))
faults = os.environ.get("FAULTS", "")
backend = os.environ.get("BACKEND", "nccl")
rank, world, local = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
mine = rank == int(os.environ.get("FAULT_RANK", "1"))
attempt, last = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("LAST_STEP", "1000000000"))
base = os.environ["PROGRESS"]
folder = os.path.dirname(base)


def begun():
    """The fault is about to happen."""
    with open(base + ".fault", "w") as f:
        f.write(str(time.time()))


def ordered(what):
    """What the demo has ordered of this rank in this attempt: a text, None without an order."""
    try:
        with open(f"{faults}/rank{rank}.attempt{attempt}.{what}") as f:
            return f.read()
    except OSError:
        return None


def broken(name, order, n):
    """Whether this step of this rank has a fault, by FAULT's name or by an order."""
    if faults:
        return ordered(order) is not None
    return fault == name and mine and (n == at if name == "skip" else n >= at)


if fault == "start_store" and mine:
    begun()
    time.sleep(3600)
if backend == "nccl":
    gpus = torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:  # ranks that share a GPU must look like those of other hosts, or NCCL refuses them
        os.environ["NCCL_HOSTID"] = f"host{local // gpus}"
    local %= gpus
    torch.cuda.set_device(local)
    dev = torch.device("cuda", local)
    dist.init_process_group(backend, device_id=None if fault == "start_nccl" else dev)  # None: NCCL's is made at the first collective
    if fault == "start_nccl" and mine:
        begun()
        os.kill(os.getpid(), signal.SIGSTOP)
else:
    dev = torch.device("cpu")
    dist.init_process_group(backend)


def whole(path, text):
    """A file that is there as a whole, or as it was."""
    with open(path + ".new", "w") as f:
        f.write(text)
    os.replace(path + ".new", path)


class Checkpoints:
    """The ranks' files, and a file `latest` with how many steps were done when the youngest was made that all ranks have."""

    def __init__(self):
        self.made = 0
        try:
            with open(f"{folder}/latest") as f:
                self.latest = int(f.read())
        except OSError:
            self.latest = 0

    @staticmethod
    def path(r, n):
        return f"{folder}/rank{r}.step{n}"

    def save(self, n, state):
        torch.save(state, self.path(rank, n) + ".new")
        os.replace(self.path(rank, n) + ".new", self.path(rank, n))
        self.made = n

    def commit(self):
        """Rank 0 says that all ranks have one; older ones go."""
        if rank == 0 and self.made > self.latest and all(os.path.exists(self.path(r, self.made)) for r in range(world)):
            whole(f"{folder}/latest", str(self.made))
            for r in range(world):
                if self.latest:
                    os.remove(self.path(r, self.latest))
            self.latest = self.made


class Losses:
    """A file with a line for each step that is done: its number from 1, and the loss of rank 0 to the last bit."""

    def __init__(self, done):
        self.waiting, self.path = [], f"{folder}/loss.txt"
        if rank == 0:
            try:
                with open(self.path) as f:
                    whole(self.path, "".join(f.readlines()[:done]))
            except OSError:
                whole(self.path, "")
        self.done = done

    def write(self):
        if rank == 0 and self.waiting:
            lines = [f"{self.done + i + 1} {float(x).hex()}\n" for i, x in enumerate(torch.stack(self.waiting).tolist())]
            with open(self.path, "a") as f:
                f.write("".join(lines))
            self.done += len(lines)
        self.waiting = []


# Before the first collective: then whoever sees one knows that losses after the checkpoint are out.
checkpoints = Checkpoints()
begin = checkpoints.latest if attempt else 0
losses = Losses(begin)
tp = dist.new_group(list(range(world)))
other = dist.new_group(list(range(world)))
width = int(os.environ.get("WIDTH", "2048"))
step = trainer(tp, dev, width, int(os.environ.get("BATCH", "64")))
metric = torch.ones(1 << 10, device=dev)
every = int(os.environ.get("CHECKPOINT", "100" if fault in ("restart", "no_restart", "checkpoints") else "0"))
pace = float(os.environ.get("PACE", "0"))
if attempt:
    faulthandler.dump_traceback_later(40)  # a second attempt that does not get to its first step says where it is
# A step for nothing: after its first one DDP lays its buckets out anew, and in which order three ranks and more are summed
# depends on where in a bucket a number lies.
kept = [copy.deepcopy(p.state_dict()) for p in step.parts]
step()
if begin:
    kept = torch.load(checkpoints.path(rank, begin), map_location=dev)
for part, state in zip(step.parts, kept):
    part.load_state_dict(state)
busy = torch.randn(4096, 4096, device=dev) if faults or fault == "slow_gpu" else None


def seconds(duration):
    """Of 1h0m0s, 120ms."""
    return sum(float(v) * {"h": 3600, "m": 60, "s": 1, "ms": 1e-3}[u] for v, u in re.findall(r"([\d.]+)(h|ms|m|s)", duration))


class Batches(torch.utils.data.Dataset):
    """A data set whose items take time on one rank."""

    def __len__(self):
        return 1 << 30

    def __getitem__(self, n):
        if faults:
            time.sleep(seconds(ordered("loader") or ""))
        if not faults and mine and n == at:
            begun()
        if not faults and mine and n >= at:
            time.sleep({"loader_hang": 3600, "loader_slow": 0.03}.get(fault, 0))
        return n


start = time.monotonic()
for n in torch.utils.data.DataLoader(Batches(), batch_size=None):
    n = int(n) + begin
    if n == begin + 1:
        faulthandler.cancel_dump_traceback_later()
    if every and n % every == 0 and n > begin:
        checkpoints.save(n, [p.state_dict() for p in step.parts])
    loss = step()
    losses.waiting.append(loss.detach())
    if broken("slow_gpu", "gpu", n):
        for _ in range(30):
            busy @ busy
    if not broken("skip", "skip", n):
        dist.all_reduce(metric, group=other)
    if broken("opposite", "swap", n):
        dist.all_reduce(metric, group=tp)
        dist.all_reduce(metric[:512], group=other)
    else:
        dist.all_reduce(metric[:512], group=other)
        dist.all_reduce(metric, group=tp)
    if n % 10 == 0 or n == last:
        float(metric[0])  # as a job that prints its loss
        metric.fill_(1)
        losses.write()
        checkpoints.commit()
        with open(f"{base}.{rank}", "w") as f:
            f.write(f"{os.getpid()} {n} {time.time()}")
    if n == last:
        break
    if pace:
        start = max(start + pace, time.monotonic() - pace)
        time.sleep(max(0, start - time.monotonic()))
with open(f"{base}.{rank}.loss", "w") as f:
    f.write(float(loss).hex())
dist.barrier()
dist.destroy_process_group()
