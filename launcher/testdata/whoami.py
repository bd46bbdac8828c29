"""Says who it is by each environment: a line of its input, as NAME=value and spaces."""
import os
import sys

from lockstep import _recorder

for line in sys.stdin:
    os.environ.clear()
    os.environ.update(v.split("=", 1) for v in line.split())
    _, job, node, rank, world, local, attempt = _recorder.whoami()
    print(job, node, rank, world, local, attempt)
