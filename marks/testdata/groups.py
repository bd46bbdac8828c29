"""lockstep.torch on what it needs of torch.distributed, as torch 2.4 to 2.9 have it."""
import types

import lockstep
import lockstep.torch


class Group:
    def __init__(self, name, desc, ranks, rank):
        self.name, self.group_desc, self.ranks, self.rank = name, desc, ranks, rank


all_ = [
    Group("0", "default_pg", [0, 1, 2, 3], 1),
    Group("3", "tp", [1, 2], 0),
    Group("4", "tp", [0, 3], -1),
    Group("5", "undefined", [0, 1], 1),
    Group("7", "undefined", [1, 3], 0),
]
world = types.SimpleNamespace(pg_map={g: None for g in all_}, pg_names={g: g.name for g in all_})
dist = types.SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_process_group_ranks=lambda g: g.ranks,
    get_rank=lambda g: g.rank,
    get_world_size=lambda: 4,
    distributed_c10d=types.SimpleNamespace(_world=world),
)
told = lockstep.torch.name_groups({all_[3]: "mine"}, dist)
assert lockstep.why() is None, lockstep.why()
assert [g["ranks"] for g in told] == [[0, 1, 2, 3], [1, 2], [0, 1], [1, 3]], told

# Another version's insides are no error of the program's.
del dist.distributed_c10d
assert lockstep.torch.name_groups(None, dist) == []
assert "distributed_c10d" in lockstep.why()
