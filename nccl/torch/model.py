"""A model for measurements: DDP with tensor parallelism, whose collectives are counted."""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

issued = 0  # collectives that the model has called


def count(n=1):
    global issued
    issued += n


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


def trainer(tp, dev, width=1024, batch=32):
    """DDP over everything, tensor parallel over tp: returns a function that makes one step."""
    world = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Model(tp, width).to(dev), bucket_cap_mb=4)

    def hook(_, bucket):  # DDP's own, counted
        count()
        return dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future().then(lambda f: f.value()[0])

    model.register_comm_hook(None, hook)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(batch, width, device=dev, requires_grad=True)  # the first layer's input has a gradient too

    def step():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    return step
