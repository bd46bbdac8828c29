"""Checkpoints that an attempt of the job which is over cannot spoil.

    from lockstep import fence

    f = fence.open(dir)                     # before anything is read there
    with f.writing("step-1000/rank3.pt") as path:
        torch.save(state, path)             # aside; in its place, whole, when the block ends well
    f.publish_text("latest", "1000")
    f.remove("step-800")

The same rules and files as Go's package fence, which says why they hold: ranks of both may share
a directory. fence.Held says that a later attempt has the directory: the program is to end.
Without LOCKSTEP_FENCE_TOKEN open() returns a Fence that holds nobody off, so that the same
program runs anywhere.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time

__all__ = ["Held", "Fence", "open"]

_DIR = ".lockstep-fence"
_TOKEN = re.compile(r"fence1-([1-9][0-9]{0,18})-(0|[1-9][0-9]{0,6})-([0-9a-f]{32})")


class Held(Exception):
    """A later attempt holds the directory. holder is its claim."""

    def __init__(self, dir, attempt, holder):
        self.holder = holder
        super().__init__(
            f"checkpoint directory {dir} is attempt {holder.get('attempt')}'s since {holder.get('at')} "
            f"(made by process {holder.get('pid')} on {holder.get('node')}), this is attempt {attempt}: "
            f"nothing more is written there"
        )


def open(dir, token=None):
    """Takes dir for the attempt of LOCKSTEP_FENCE_TOKEN, or of token."""
    return Fence(dir, os.environ.get("LOCKSTEP_FENCE_TOKEN", "") if token is None else token)


def _sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not os.path.isdir(path):  # some file systems have nothing to sync of a directory
            raise
    finally:
        os.close(fd)


def _generations(at, prefix):
    found = []
    for name in os.listdir(at):
        if name.startswith(prefix) and len(name) == len(prefix) + 20 and name[len(prefix):].isdigit():
            found.append(int(name[len(prefix):]))
    return sorted(found)


class Fence:
    def __init__(self, dir, token):
        self.dir = os.path.abspath(dir)
        self._in = os.path.join(self.dir, _DIR)
        os.makedirs(self._in, exist_ok=True)
        self._token = token
        if not token:
            self._stage = os.path.join(self._in, "unfenced")
            self.generation = self.attempt = None
            os.makedirs(self._stage, exist_ok=True)
            return
        m = _TOKEN.fullmatch(token)
        if m is None or int(m[1]) >= 1 << 63 or int(m[2]) > 1 << 20:
            raise ValueError("LOCKSTEP_FENCE_TOKEN is not in the form that it is made in")
        self.generation, self.attempt = int(m[1]), int(m[2])
        self._stage = os.path.join(self._in, "stage.%020d" % self.generation)
        # The stage before the claim, the claim before the look: see the Go package.
        try:
            os.mkdir(self._stage)
        except FileExistsError:
            if not os.path.isdir(self._stage):
                self.check()
                raise
        self._claim()
        try:
            self.check()
        except Held:
            shutil.rmtree(self._stage, ignore_errors=True)
            raise
        for g in _generations(self._in, "stage."):
            if g < self.generation:
                self._bury(os.path.join(self._in, "stage.%020d" % g))
        self.check()

    def _claim(self):
        key = hashlib.sha256(b"lockstep claim\0" + self._token.encode()).hexdigest()[:32]
        claim = {
            "version": 1, "generation": self.generation, "attempt": self.attempt, "key": key, "node": socket.gethostname(),
            "pid": os.getpid(), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if os.environ.get("LOCKSTEP_JOB"):
            claim["job"] = os.environ["LOCKSTEP_JOB"]
        tmp = os.path.join(self._in, ".new-" + secrets.token_hex(8))
        path = os.path.join(self._in, "claim.%020d" % self.generation)
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(fd, "w") as f:
            json.dump(claim, f)
            f.flush()
            os.fsync(f.fileno())
        try:
            os.link(tmp, path)
            _sync(self._in)
        except FileExistsError:
            with os.fdopen(os.open(path, os.O_RDONLY)) as f:
                other = json.load(f)
            if other.get("key") != key or other.get("attempt") != self.attempt:
                raise Held(self.dir, self.attempt, other) from None
        finally:
            os.unlink(tmp)

    def check(self):
        """Raises Held once a later attempt has the directory."""
        if self.generation is None:
            return
        claims = _generations(self._in, "claim.")
        if claims and claims[-1] > self.generation:
            holder = {}
            try:
                with os.fdopen(os.open(os.path.join(self._in, "claim.%020d" % claims[-1]), os.O_RDONLY)) as f:
                    holder = json.load(f)
            except (OSError, ValueError):
                pass  # it is there: what it says matters less
            raise Held(self.dir, self.attempt, holder if isinstance(holder, dict) else {})

    def _bury(self, stage):
        for _ in range(100):
            if os.path.lexists(stage) and not os.path.isdir(stage):
                return
            dead = os.path.join(self._in, "dead." + secrets.token_hex(8))
            with contextlib.suppress(FileNotFoundError):
                os.rename(stage, dead)
            made = True
            try:
                os.close(os.open(stage, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
                _sync(self._in)
            except FileExistsError:
                made = False  # buried by another, or made again: look
            for _ in range(100):
                try:
                    shutil.rmtree(dead)
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    continue
            if made:
                return
        raise OSError(f"{stage} comes back again and again: something goes on writing there")

    def _name(self, name):
        parts = name.split("/")
        if not name or name.startswith("/") or any(p in ("", ".", "..") for p in parts) or parts[0] == _DIR:
            raise ValueError(f"{name!r}: want a path inside the checkpoint directory")
        return parts

    def stage(self, name):
        """Where a file or directory of that name is to be written before publish()."""
        at = self._stage
        for part in self._name(name)[:-1]:
            at = os.path.join(at, part)
            try:
                os.mkdir(at)
            except FileExistsError:
                pass
            except OSError:
                self.check()
                raise
        return os.path.join(self._stage, name)

    def publish(self, name):
        """Moves what was staged to its place, at once and for good."""
        self._name(name)
        self.check()
        source, target = os.path.join(self._stage, name), os.path.join(self.dir, name)
        try:
            if os.path.isfile(source):
                _sync(source)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                os.rename(source, target)
            except (IsADirectoryError, NotADirectoryError, FileExistsError, OSError):
                if not os.path.lexists(source) or not os.path.lexists(target):
                    raise
                self._take_away(name)
                os.rename(source, target)
            _sync(os.path.dirname(target))
        except OSError:
            self.check()
            raise

    def _take_away(self, name):
        gone = os.path.join(self._stage, ".gone-" + secrets.token_hex(8))
        os.rename(os.path.join(self.dir, name), gone)
        if os.path.isdir(gone):
            shutil.rmtree(gone)
        else:
            os.unlink(gone)

    @contextlib.contextmanager
    def writing(self, name):
        """A context whose value is the path to write to; the file appears when it ends well."""
        self.check()
        path = self.stage(name)
        yield path
        self.publish(name)

    def publish_text(self, name, text):
        """Replaces a small file as a whole."""
        with self.writing(name) as path:
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            except OSError:
                self.check()
                raise
            with os.fdopen(fd, "w") as f:
                f.write(text)

    def remove(self, name):
        """Removes a file or directory; one that is not there is no error."""
        self._name(name)
        self.check()
        try:
            self._take_away(name)
        except FileNotFoundError:
            pass
        except OSError:
            self.check()
            raise
        self.check()
