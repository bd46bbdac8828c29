"""What torch.distributed's process groups are called, for Lockstep.

    import lockstep.torch

    mesh = init_device_mesh(...)           # or dist.new_group(..., group_desc="tp")
    lockstep.torch.name_groups()           # again when there are new groups
    lockstep.torch.name_groups({tp: "tp"}) # names of your own

Communicators then have these names in verdicts, metrics and traces, instead of the numbers
that torch gives its groups. Nothing here raises: name_groups returns the groups that it told
of, and an empty list where there is no torch.distributed.
"""

import json
import os

from . import _recorder


def groups(names=None, dist=None):
    """This process's groups: name (torch's), title (for people), rank in it, size, and ranks.

    names gives titles to groups; else a group's own description counts, else its name."""
    if dist is None:
        try:
            import torch.distributed as dist
        except ImportError:
            return []
    if not dist.is_available() or not dist.is_initialized():
        return []
    c10d = dist.distributed_c10d
    given = {}
    for pg, title in (names or {}).items():
        given[id(pg)] = title
    out = []
    for pg in list(c10d._world.pg_map):
        ranks = dist.get_process_group_ranks(pg)
        rank = dist.get_rank(pg)
        if rank < 0:
            continue  # not of it
        name = str(c10d._world.pg_names[pg])
        desc = getattr(pg, "group_desc", "")
        if desc in ("", "undefined"):
            desc = ""
        if not desc and len(ranks) == dist.get_world_size():
            desc = "world"
        if desc == "default_pg":
            desc = "world"
        out.append({"name": name, "title": str(given.get(id(pg)) or desc or name), "rank": rank, "size": len(ranks), "ranks": list(ranks)})
    return out


def name_groups(names=None, dist=None):
    """Tells the node's agent what this process's groups are called."""
    try:
        found = groups(names, dist)
        path = _recorder.path()
        if not found or path is None:
            return []
        told = [{k: g[k] for k in ("name", "title", "rank", "size")} for g in found]
        tmp = f"{path}.groups.{os.getpid()}"
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as f:
                json.dump(told, f)
            os.replace(tmp, f"{path}.groups")
        except BaseException:
            os.unlink(tmp)
            raise
        return found
    except Exception as e:  # the program matters more
        _recorder.because(e)
        return []
