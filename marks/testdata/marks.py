"""The same marks as marks.c. It ends when its input does."""
import os
import sys

import lockstep

lockstep.step(7)
with lockstep.checkpoint():
    pass
child = os.fork()
if child == 0:
    lockstep.step(1000)
    os._exit(0)
os.waitpid(child, 0)
with lockstep.evaluation():
    pass
batches = lockstep.loading([1])
lockstep._recorder.mark(lockstep._recorder.L.MARK_DATA_LOADING, lockstep._recorder.L.FLAG_BEGIN, 0)
print(lockstep._recorder._recorder.path if lockstep.why() is None else lockstep.why(), flush=True)
sys.stdin.read()
