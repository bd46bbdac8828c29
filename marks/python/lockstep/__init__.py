"""The program's own words, for Lockstep: steps, checkpoints, evaluation, data loading.

    import lockstep

    for n, batch in enumerate(lockstep.loading(loader)):
        lockstep.step(n)
        ...
        if n % 1000 == 0:
            with lockstep.checkpoint():
                torch.save(...)

Pure Python, with nothing to build or install beyond this folder. No call raises or blocks:
where no file of marks can be made (why() says why) they do nothing. Which rank of which job
the process is comes from its launcher's variables. In forked children, such as a data
loader's workers, the calls do nothing.
"""

import contextlib

from . import _recorder

__all__ = ["step", "checkpoint", "evaluation", "compiling", "data_loading", "loading", "why", "close"]


def step(n):
    """The step of this number, from 0, begins. Numbers grow, also over restarts."""
    _recorder.step(n)


@contextlib.contextmanager
def _span(code):
    _recorder.mark(code, _recorder.L.FLAG_BEGIN, 0)
    try:
        yield
    finally:
        _recorder.mark(code, 0, 0)


def checkpoint():
    """A context in which the program writes or reads a checkpoint.

    While others wait for it, it is not taken to hang, unless it lasts far longer than such
    pauses have."""
    return _span(_recorder.L.MARK_CHECKPOINT)


def evaluation():
    """A context in which the program evaluates; as checkpoint()."""
    return _span(_recorder.L.MARK_EVALUATION)


def compiling():
    """A context in which the program compiles; as checkpoint()."""
    return _span(_recorder.L.MARK_COMPILE)


def data_loading():
    """A context in which the program waits for its data loader.

    It excuses nothing: a loader that does not return is a fault, and the verdict says that
    the rank was in there."""
    return _span(_recorder.L.MARK_DATA_LOADING)


def loading(batches):
    """Iterates over batches, and tells that each next one is data loading, and so is the loader's start."""
    with data_loading():  # its workers are forked from a process that has its file of marks
        it = iter(batches)
    while True:
        with data_loading():
            try:
                batch = next(it)
            except StopIteration:
                return
        yield batch


def why():
    """Why there are no marks, as text; None while there are, or none was made yet."""
    return _recorder.why()


def close():
    """Ends the file of marks; the interpreter's end does it too."""
    _recorder.close()
