#!/usr/bin/env python3
"""Faults in a PyTorch job under lockstep attach: what the master says of each, and when.

    make build && python3 nccl/torch/faults.py             on a machine with two GPUs or more
    … --ranks 3 --faults throttle                          ranks that share GPUs, as those of other hosts: over sockets

Each fault has a job of its own (faultjob.py under torchrun). Printed is what was suspected and confirmed first,
with the time from the fault; --keep DIR keeps statuses, RAS's answers and the recordings of evidence.
"""
import argparse
import ctypes
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
SO_MAX_PACING_RATE = 47  # socket(7), asm-generic/socket.h
# Fault, who does it (the job itself, or a signal from outside), seconds to watch, and what is right.
FAULTS = {
    "healthy": (None, 10, ()),
    "checkpoints": (None, 10, ()),
    "sigstop": (signal.SIGSTOP, 15, ("noncommunication_hang",)),
    "kill": (signal.SIGKILL, 12, ("process_gone", "noncommunication_hang")),
    "skip": (None, 20, ("",)),
    "opposite": (None, 20, ("",)),
    "loader_hang": (None, 20, ("noncommunication_hang",)),
    "loader_slow": (None, 30, ("noncommunication_slow",)),
    "slow_gpu": (None, 30, ("noncommunication_slow",)),
    "restart": (signal.SIGKILL, 0, ("noncommunication_hang",)),
    "throttle": ("pace", 30, ("communication_slow",)),
    # Before the first communicator: rank 1 never comes to the store; or it stops where the others make NCCL's.
    "start_store": (None, 40, ("noncommunication_hang",)),
    "start_nccl": (None, 40, ("noncommunication_hang",)),
}
# The network path instead of NVLink.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
ENV = {"throttle": SOCKETS}  # what some of them need


def throttle(pid, rate=25_000_000):
    """What a process sends over its TCP connections goes no faster from now on, in bytes a second each; what others send does.

    Its sockets are borrowed (pidfd_getfd, which takes the rights of a debugger) and paced by the kernel: there is no
    need of tc, and of nothing that the process does. Returns how many they are."""
    libc, slowed = ctypes.CDLL(None, use_errno=True), 0
    pidfd = libc.syscall(434, pid, 0)  # pidfd_open
    if pidfd < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_open of process {pid}")
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
            except OSError:
                continue  # closed since
            fd = libc.syscall(438, pidfd, int(name), 0)  # pidfd_getfd
            if fd < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd: a socket of process {pid} (it takes the rights of a debugger)")
            with socket.socket(fileno=fd) as s:
                try:
                    s.getpeername()
                    if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                        s.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
                        slowed += 1
                except OSError:
                    continue  # it listens, or has ended
    finally:
        os.close(pidfd)
    if not slowed:
        raise RuntimeError(f"process {pid} has no connections: NCCL does not use sockets there")
    return slowed


def ask_ras(port, words, seconds=12):
    """RAS's answer to some lines, as it comes."""
    with socket.create_connection(("localhost", port), timeout=5) as s:
        s.settimeout(seconds)
        s.sendall(words.encode())
        out = b""
        while True:
            try:
                part = s.recv(1 << 16)
            except OSError as e:
                return out.decode(errors="replace") + f"\n[{e}]"
            if not part:
                return out.decode(errors="replace")
            out += part


def progress(path, rank):
    try:
        with open(f"{path}.{rank}") as f:
            pid, step, at = f.read().split()
            return int(pid), int(step), float(at)
    except (OSError, ValueError):
        return None


class Run:
    """One job with its fault."""

    def __init__(self, o, name):
        self.o, self.name = o, name
        self.dir = tempfile.mkdtemp(prefix="lockstep-faults-", dir="/dev/shm")
        self.said, self.state, self.web = [], os.path.join(self.dir, "state"), None
        self.progress = os.path.join(self.dir, "progress")
        self.ras = o.port + 1
        o.port += 2
        env = dict(os.environ, FAULT=name, PROGRESS=self.progress, PYTHONUNBUFFERED="1", NCCL_RAS_ADDR=f"localhost:{self.ras}", FAULT_STEP=str(o.step), BACKEND=o.backend,
                   NCCL_DEBUG="WARN")
        env.setdefault("NCCL_NVLS_ENABLE", "0")
        # Else torchrun's attempts share a store, in which a rank may find the former attempt's NCCL id, and wait for a
        # process that is gone (pytorch/pytorch#135712, #167288).
        env.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        env.update(ENV.get(name, {}))
        if o.ranks > o.gpus:
            env.update(SOCKETS)  # NCCL takes them for ranks of other hosts
        env.update(x.split("=", 1) for x in o.env)
        self.p = subprocess.Popen(
            [o.lockstep, "attach", "--job", "fault-" + name.replace("_", "-"), "--runtime-dir", os.path.join(self.dir, "run"), "--state-dir", self.state,
             "--agent-web", "127.0.0.1:0", "--master-web", "127.0.0.1:0", "--start-patience", "5s", "--", sys.executable, "-B", "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(o.ranks), "--max_restarts", "1" if name == "restart" else "0",
             "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{o.port + 500}", "--rdzv_id", name, os.path.join(HERE, "faultjob.py")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.p.stdout:
            self.said.append(line.rstrip())
            del self.said[:-200]
            if (m := re.search(r"master started at (http://\S+)/status", line)):
                self.web = m[1]
            if (m := re.search(r"agent started at (http://\S+)/metrics", line)):
                self.agent = m[1]

    def status(self):
        with urllib.request.urlopen(self.web + "/api/v1/status", timeout=3) as f:
            return json.load(f)

    def steps(self):
        return [progress(self.progress, r) for r in range(self.o.ranks)]

    def wait_for_steps(self, n):
        """Until every rank has come to step n, with 0 until the master has a page: each rank's process, step and when."""
        until = time.time() + self.o.start_timeout
        while time.time() < until and self.p.poll() is None:
            s = self.steps()
            if self.web and (n == 0 or all(s)) and n <= min((x[1] for x in s if x), default=0):
                return s
            time.sleep(0.05)
        raise RuntimeError(f"the job does not run: {self.steps()}, web {self.web}, status {self.p.poll()}\n  " + "\n  ".join(self.said[-30:]))

    def watch(self, at, seconds):
        """What is said from then on: level, class, culprits, when; and the last status."""
        seen, last, over = {}, {}, None
        while time.time() < at + seconds and (over is None or time.time() < over + 1):
            try:
                last = self.status()
            except OSError:
                break  # the master has ended with the job
            for i in last["open_incidents"] + last["closed_incidents"]:
                who = ",".join(f"{c['kind']} {c['name']}" + (f" ({c['reason']})" if c.get("reason") else "") for c in i["culprits"])
                seen.setdefault((i["level"], i["class"], who), (time.time() - at, i))
                if i["level"] == "confirmed" and over is None:
                    over = time.time()
            time.sleep(0.1)
        return seen, last

    def keep(self, last, ras=()):
        """What an inquiry afterwards wants: the last status, what was printed, RAS's answers, recordings of evidence."""
        if not self.o.keep:
            return
        to = os.path.join(self.o.keep, self.name)
        os.makedirs(to, exist_ok=True)
        files = {"status.json": json.dumps(last, indent=1), "said.txt": "\n".join(self.said)}
        files.update({f"ras.{k}.txt": ras[k] for k in ras})
        for name, text in files.items():
            with open(os.path.join(to, name), "w") as f:
                f.write(text)
        time.sleep(0.5)
        for path in glob.glob(os.path.join(self.state, "**/*"), recursive=True):
            if os.path.isfile(path) and os.path.getsize(path) < 8 << 20:
                shutil.copy(path, os.path.join(to, os.path.basename(path)))

    def processes(self):
        """The job's: those whose environment has its path for progress; ranks that are stopped or have made no step too."""
        mine, out = f"PROGRESS={self.progress}".encode(), []
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                with open(path, "rb") as f:
                    if mine in f.read().split(b"\0"):
                        out.append(int(path.split("/")[2]))
            except OSError:
                pass  # it has ended
        return out

    def end(self):
        groups = set()
        for pid in [self.p.pid] + self.processes():
            try:
                os.kill(pid, signal.SIGCONT)
                groups.add(pid)
            except OSError:
                pass
        time.sleep(0.3)
        for pid in groups:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        self.p.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


def losses(r):
    return [open(p).read() for p in sorted(glob.glob(r.progress + ".*.loss"))]


def play_restart(o):
    """A rank is killed, torchrun starts all again, and they go on from their last checkpoint: the same losses as without."""
    last, got, out = o.step + 350, [], None
    o.env.append(f"LAST_STEP={last}")
    for name in ("no_restart", "restart"):
        r = Run(o, name)
        try:
            steps, at, seen, attempts, st = r.wait_for_steps(o.step), time.time(), {}, set(), {}
            if name == "restart":
                os.kill(steps[1][0], signal.SIGKILL)
                at = time.time()
            while r.p.poll() is None and time.time() < at + o.restart_timeout:
                try:
                    st = r.status()
                    attempts.add((st["attempt"], st["health"]))
                    for i in st["open_incidents"] + st["closed_incidents"]:
                        key = (i["level"], i["class"], ",".join(f"{c['kind']} {c['name']} ({c.get('reason')})" for c in i["culprits"]))
                        if key not in seen:
                            seen[key] = time.time() - at
                            print(f"{seen[key]:6.2f} s {' '.join(key)}\n       " + "\n       ".join(i["evidence"]))
                except OSError:
                    pass
                time.sleep(0.1)
            print(f"\n## {name}: exit status {r.p.poll()}, {time.time() - at:.1f} s; attempts and healths {sorted(attempts)}; steps {r.steps()}; losses {losses(r)}", flush=True)
            r.keep(st)
            if not losses(r):
                print("\n".join(r.said[-40:]))
            got.append(losses(r))
            out = next(((t, k[1], k[2]) for k, t in seen.items() if k[0] == "confirmed"), out)
        finally:
            r.end()
    o.env.pop()
    print("losses are", "equal" if got[0] and got[0] == got[1] else "NOT EQUAL")
    return out


def play(o, name):
    if name == "restart":
        return play_restart(o)
    how, seconds, right = FAULTS[name]
    seconds = o.seconds or seconds
    r = Run(o, name)
    try:
        first = r.wait_for_steps(0 if name.startswith("start_") else o.step - 100 if right and how is None else o.step)
        if how == "pace":
            at = time.time()
            throttle(first[1][0])
        elif how is not None:
            os.kill(first[1][0], how)
            at = time.time()
        elif not right:
            at = time.time()
        else:
            until = time.time() + o.start_timeout
            while not os.path.exists(r.progress + ".fault") and time.time() < until:
                time.sleep(0.01)
            with open(r.progress + ".fault") as f:
                at = float(f.read())
        seen, last = r.watch(at, seconds)
        steps = r.steps()
        ras = {}
        if o.backend == "nccl" and name in ("healthy", "sigstop", "skip", "opposite", "loader_hang", "kill"):
            for k, words in {"json": "CLIENT PROTOCOL 2\nTIMEOUT 3\nSET FORMAT json\nVERBOSE STATUS\n", "text": "CLIENT PROTOCOL 2\nTIMEOUT 3\nVERBOSE STATUS\n"}.items():
                try:
                    ras[k] = ask_ras(r.ras, words)
                except OSError as e:
                    ras[k] = f"[{e}]"
        if o.backend == "nccl" and name == "sigstop":  # what a SIGCONT undoes
            for pid, *_ in steps:
                os.kill(pid, signal.SIGCONT)
            time.sleep(1)
        print(f"\n## {name}: steps {[s and s[1] for s in steps]}, {[round(at - s[2], 1) for s in steps if s]} s before the fault was the last that was told")
        for (level, cls, who), (t, i) in sorted(seen.items(), key=lambda x: x[1][0]):
            print(f"{t:6.2f} s {level:10} {cls:24} {who}; {i['communicator']} {i['collective']} #{i['sequence']}")
        for (level, cls, who), (t, i) in seen.items():
            if level == "confirmed":
                print("       " + "\n       ".join(i["evidence"]))
        if not seen:
            print("       nothing was said")
        if last:
            print("       ranks", last.get("ranks"), "health", last.get("health"), "communicators", [(c["name"], c["size"], c["finished_least"], c["finished_most"]) for c in last.get("communicators", [])])
        r.keep(last, ras)
        confirmed = [(t, cls, who) for (level, cls, who), (t, _) in seen.items() if level == "confirmed"]
        return min(confirmed, default=None)
    finally:
        r.end()


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--lockstep", default=os.path.join(HERE, "../../bin/lockstep"))
    a.add_argument("--gpus", type=int, default=2)
    a.add_argument("--ranks", type=int, default=0, help="more than GPUs: they share them, over sockets (0: as many)")
    a.add_argument("--step", type=int, default=400, help="in which the fault happens")
    a.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    a.add_argument("--env", nargs="*", default=[], help="NAME=VALUE of the job")
    a.add_argument("--keep")
    a.add_argument("--port", type=int, default=28100)
    a.add_argument("--backend", default="nccl")
    a.add_argument("--start-timeout", type=float, default=60)
    a.add_argument("--restart-timeout", type=float, default=150, help="seconds from a rank's death to the job's end")
    a.add_argument("--seconds", type=float, default=0, help="to watch, in place of each fault's own")
    o = a.parse_args()
    o.ranks = o.ranks or o.gpus
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    rows = []
    for name in o.faults:
        at = time.time()
        try:
            rows.append((name, play(o, name)))
        except Exception as e:  # the other faults are worth having
            print(f"\n## {name}: {type(e).__name__}: {e}")
            rows.append((name, "failed"))
        print(f"       ({time.time() - at:.0f} s)", flush=True)
    print("\nfault         confirmed first, seconds after it")
    for name, got in rows:
        print(f"{name:13} " + ("nothing" if got is None else got if got == "failed" else f"{got[0]:6.2f}  {got[1]}: {got[2]}"))


if __name__ == "__main__":
    main()
