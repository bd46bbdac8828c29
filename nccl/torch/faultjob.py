"""A training job with a fault in one rank, by FAULT: what faults.py starts under lockstep attach.

It knows nothing of Lockstep: an unmodified PyTorch script. BACKEND=gloo runs it without GPUs.
"""
import faulthandler
import os
import signal
import time

import torch
import torch.distributed as dist

from model import trainer

fault, at = os.environ.get("FAULT", ""), int(os.environ.get("FAULT_STEP", "400"))
backend = os.environ.get("BACKEND", "nccl")
rank, world, local = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
mine = rank == int(os.environ.get("FAULT_RANK", "1"))


def begun():
    """The fault is about to happen."""
    with open(os.environ["PROGRESS"] + ".fault", "w") as f:
        f.write(str(time.time()))


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
tp = dist.new_group(list(range(world)))
other = dist.new_group(list(range(world)))
width = int(os.environ.get("WIDTH", "2048"))
step = trainer(tp, dev, width, int(os.environ.get("BATCH", "64")))
metric = torch.ones(1 << 10, device=dev)
base = os.environ["PROGRESS"]
attempt, last = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("LAST_STEP", "1000000"))
begin = 0
if attempt:
    faulthandler.dump_traceback_later(40)  # a second attempt that does not get to its first step says where it is


def save(n):
    """A checkpoint of this rank's, whole or not there."""
    torch.save([n] + [p.state_dict() for p in step.parts], f"{base}.{rank}.tmp")
    os.replace(f"{base}.{rank}.tmp", f"{base}.{rank}.checkpoint{n}")


if fault == "restart" and attempt:  # the youngest that all have
    begin = max(n for n in range(0, last, 100) if all(os.path.exists(f"{base}.{r}.checkpoint{n}") for r in range(world)))
    kept = torch.load(f"{base}.{rank}.checkpoint{begin}", map_location=dev)
    for part, state in zip(step.parts, kept[1:]):
        part.load_state_dict(state)
slow = torch.randn(4096, 4096, device=dev) if fault == "slow_gpu" and mine else None


class Batches(torch.utils.data.Dataset):
    """A data set whose items take time on one rank."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, n):
        if mine and n == at:
            begun()
        if mine and n >= at:
            time.sleep({"loader_hang": 3600, "loader_slow": 0.03}.get(fault, 0))
        return n


for n in torch.utils.data.DataLoader(Batches(), batch_size=None):
    n = int(n) + begin
    if n == begin + 1:
        faulthandler.cancel_dump_traceback_later()
    if fault in ("restart", "no_restart", "checkpoints") and n % 100 == 0:
        save(n)
    loss = step()
    if slow is not None and n >= at:
        for _ in range(30):
            slow @ slow
    if not (fault == "skip" and mine and n == at):
        dist.all_reduce(metric, group=other)
    if fault == "opposite" and n >= at and mine:
        dist.all_reduce(metric, group=tp)
        dist.all_reduce(metric[:512], group=other)
    else:
        dist.all_reduce(metric[:512], group=other)
        dist.all_reduce(metric, group=tp)
    if n % 10 == 0:
        float(metric[0])  # as a job that prints its loss
        metric.fill_(1)
        with open(f"{os.environ['PROGRESS']}.{rank}", "w") as f:
            f.write(f"{os.getpid()} {n} {time.time()}")
    if n == last:
        break
with open(f"{base}.{rank}.loss", "w") as f:
    f.write(float(loss).hex())
dist.barrier()
dist.destroy_process_group()
