#!/usr/bin/env python3
"""What the NCCL profiler plugin sees of a PyTorch job, and what it costs.

    make build && python3 nccl/torch/measure.py            on a machine with two GPUs or more

prints tables: collectives recorded ÷ issued by kind of call (DDP with tensor parallelism, all kinds,
CUDA graphs, all_to_all, send/recv, symmetric windows), durations beside CUDA events, transfers over
sockets, and times by size and steps a second, in turn: without a plugin, with one that does nothing (the calls
asked for, or kernels too: what NCCL itself takes for them), with Lockstep's default, with every operation timed, and
with all events. `--only speed` is that alone; it needs a C compiler. `--only switch` turns timing on and off within the
same processes, where one process is faster than another by more than is measured.
It exits with 1 when a collective is neither recorded nor counted.
"""
import argparse
import glob
import json
import math
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))


API, KERNELS = 0x700, 0x75e  # events of NCCL: calls; and what Lockstep asks for where every operation is timed


def empty_plugin(folder):
    """empty/plugin.c, built."""
    so = os.path.join(folder, "libempty.so")
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-I", os.path.join(HERE, "../plugin"), os.path.join(HERE, "empty", "plugin.c"), "-o", so], check=True)
    return so


class Job:
    """worker.py on every GPU; mode is off, ops, default, net or all, or a plugin and its environment."""

    def __init__(self, o, what, mode, env=None):
        plugin = "none" if mode == "off" else os.path.abspath(o.plugin)
        if isinstance(mode, tuple):
            mode, plugin, more = mode
            env = dict(more, **(env or {}))
        self.what, self.mode, self.timeout = what, mode, o.timeout
        self.dir = tempfile.TemporaryDirectory(prefix="lockstep-", dir="/dev/shm")
        base = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(o.port), WORLD_SIZE=str(o.gpus), PYTHONUNBUFFERED="1",
                    LOCKSTEP_RUNTIME_DIR=self.dir.name, LOCKSTEP_JOB="measure", LOCKSTEP_NCCL_EVENTS=mode if mode in ("ops", "net", "all") else "default",
                    NCCL_RAS_ADDR=f"localhost:{o.port + 1000}")
        base.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not what is measured, and not allowed everywhere
        base["NCCL_PROFILER_PLUGIN"] = plugin
        base.update(env or {})
        if "EMPTY_SWITCH" in base:
            base["EMPTY_SWITCH"] = os.path.join(self.dir.name, base["EMPTY_SWITCH"])
        o.port += 1
        self.ranks = [subprocess.Popen([sys.executable, "-B", os.path.join(HERE, "worker.py"), what], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, env=dict(base, RANK=str(r), LOCAL_RANK=str(r))) for r in range(o.gpus)]
        self.errors = [[] for _ in self.ranks]
        for p, kept in zip(self.ranks, self.errors):
            threading.Thread(target=self.drain, args=(p.stderr, kept), daemon=True).start()
        self.timer = None
        self.wait()

    @staticmethod
    def drain(stream, kept):
        for line in stream:
            kept.append(line)
            del kept[:-60]

    def kill(self):
        for p in self.ranks:
            p.kill()

    def wait(self):
        """Gives the job the timeout from now on."""
        if self.timer:
            self.timer.cancel()
        self.timer = threading.Timer(self.timeout, self.kill)
        self.timer.daemon = True
        self.timer.start()

    def answer(self, word):
        """Rank 0's next line that begins so."""
        for line in self.ranks[0].stdout:
            if line.startswith(word):
                return json.loads(line[len(word):])
        self.kill()
        time.sleep(0.2)
        raise RuntimeError(f"{self.what}, plugin {self.mode}: no {word}: exit statuses {[p.wait() for p in self.ranks]}\n" +
                           "".join(f"rank {r}: {line}" for r, kept in enumerate(self.errors) for line in kept[-25:]))

    def ask(self, what, size, n):
        self.wait()
        for p in self.ranks:
            p.stdin.write(f"{what} {size} {n}\n")
            p.stdin.flush()
        return self.answer("ANSWER ")

    def end(self):
        try:
            for p in self.ranks:
                p.stdin.close()
            for p in self.ranks:
                p.wait(timeout=30)
        except (subprocess.TimeoutExpired, OSError):
            pass
        self.kill()
        self.timer.cancel()
        self.dir.cleanup()


def job(o, what, mode, env=None):
    j = Job(o, what, mode, env)
    try:
        return j.answer("RESULT ")
    finally:
        j.end()


def size_name(n):
    for unit, k in (("G", 30), ("M", 20), ("K", 10)):
        if n >> k:
            return f"{n >> k}{unit}"
    return str(n)


def accounting(o):
    bad = False
    for events in o.events:
        got = job(o, "accounting", events, {"MEASURE_STEPS": str(o.steps)})
        c = got["counters"]
        print(f"\n## Recorded ÷ issued (NCCL {got['nccl']}, torch {got['torch']}, {o.gpus} GPUs, events {events}, interface v{c['version']})")
        print(f"{'':26} {'issued':>8} {'numbered':>8} {'recorded':>8} {'no end':>7} {'lost':>5} {'open':>5} {'over-':>6}  ratio")
        for s in got["result"]:
            if "failed" in s:
                bad = True
                print(f"{s['section']:26} failed: {s['failed']}")
                continue
            ratio = (s["ended"] + s["overwritten"] // 3) / max(s["issued"], 1)
            print(f"{s['section']:26} {s['issued']:8} {s['numbered']:8} {s['ended']:8} {s['unseen']:7} {s['lost']:5} {s['open']:5} {s['overwritten']:6}  {100 * ratio:.2f} %")
            if s["open"]:
                bad = True
                print(f"{'':26} {s['open']} operations were not over 10 s after the GPU was: they are among the next ones' recorded")
            bad |= s["numbered"] != s["issued"] or s["ended"] + s["lost"] + s["overwritten"] // 3 < s["issued"]
        print(f"events lost {c['events_lost']}, of other processes {c['events_foreign']}, operations lost {c['ops_lost']}, without an end {c['ops_unseen']}")
        for comm in got["comms"]:
            print(f"communicator {comm['index']:3} {comm['name']!r:20} rank {comm['rank']} of {comm['size']}: {comm['enqueued']} called, {comm['finished']} finished")
    return bad


def durations(o):
    bad = False
    got = job(o, "durations", "net")
    print("\n## Durations of an all-reduce, µs: GPU stamps of the kernel beside CUDA events around the call")
    print(f"{'':8}{'bytes':>8} {'stamps':>10} {'events':>10} {'events - stamps: least':>22} {'median':>10} {'p99':>10}")
    for r in got["result"]:
        if "missing" in r:
            bad = True
            print(f"{r['way']:8}{size_name(r['size']):>8} {r['missing']} of them are missing")
        else:
            print(f"{r['way']:8}{size_name(r['size']):>8} {r['ours_us']:10.2f} {r['events_us']:10.2f} {r['err_least_us']:22.2f} {r['err_median_us']:10.2f} {r['err_p99_us']:10.2f}")
    return bad


def selfsend(o):
    """NCCL 2.27 to 2.30 counts what a rank sends to itself in the kernel and not on the host, and finds wrong stamps from then on."""
    got = job(o, "selfsend", "net")
    print("\n## All-reduces of a communicator after all-to-alls, µs: stamps that are not their own are not recorded")
    print(f"{'parts of':>8} {'bytes':>8} {'open':>5} {'stamps':>10} {'events':>10} {'events - stamps: least':>22} {'median':>10} {'p99':>10}")
    for r in got["result"]:
        if "missing" in r:
            print(f"{size_name(r['part']):>8} {size_name(r['size']):>8} {r['open']:5} {r['missing']} have no stamps")
        else:
            print(f"{size_name(r['part']):>8} {size_name(r['size']):>8} {r['open']:5} {r['ours_us']:10.2f} {r['events_us']:10.2f} {r['err_least_us']:22.2f} {r['err_median_us']:10.2f} {r['err_p99_us']:10.2f}")
    # A kernel's stamps lie within the events around its call; what makes an event late, such as a busy host, is a few of a hundred.
    return any(r["open"] or not -5 < r.get("err_least_us", 0) <= r.get("err_median_us", 0) < 100 for r in got["result"])


def sockets(o):
    got = job(o, "accounting", "all", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "MEASURE_STEPS": "100"})
    c = got["counters"]
    print("\n## Over sockets: what rank 0 saw of each connection")
    for k in got["conns"]:
        print(f"peer {k['peer']:3} {k['name']:24} sent {k['posted']:>14} taken {k['completed']:>14} received {k['received']:>14} B, {k['bps'] / 1e9:.3f} GB/s, "
              f"{k['latency_ns'] / 1e3:.1f} µs, {k['windows']} windows, {k['slow']} slow")
    for s in got["result"]:
        print(s)
    for comm in got["comms"]:
        if comm["ops"]:
            print(f"communicator {comm['name']!r}: {comm['ops']} operations, waited {comm['wait_ns'] / 1e6:.1f} ms, transferred {comm['transfer_ns'] / 1e6:.1f} ms, own {comm['own_ns'] / 1e6:.1f} ms")
    print(f"events lost {c['events_lost']}, of other processes {c['events_foreign']}")
    return not got["conns"]


# What is timed: kind, bytes, calls a round, rounds. Jobs take turns, a few rounds a visit, before which the same calls are made
# for --warm seconds: Lockstep times the first 256 calls after a rest, and learns in a second which share of those that follow
# it can afford.
VISITS = 3
SWEEP = [("raw", s, n, k) for s, n, k in [(8, 16000, 12), (1 << 10, 16000, 8), (4 << 10, 16000, 8), (16 << 10, 16000, 8), (64 << 10, 16000, 8), (128 << 10, 12000, 12),
                                          (256 << 10, 12000, 12), (512 << 10, 10000, 12), (1 << 20, 8000, 12), (2 << 20, 4000, 12), (4 << 20, 4000, 12), (16 << 20, 1000, 8),
                                          (64 << 20, 200, 8), (256 << 20, 50, 6), (1 << 30, 20, 6)]] + \
        [("torch", 8, 8000, 8), ("torch", 1 << 20, 8000, 8), ("steps", 0, 100, 20)]


def line(what, size):
    return f"{what} {size_name(size)}" if size else what


def speed(o):
    with tempfile.TemporaryDirectory() as d:
        return speed_with(o, empty_plugin(d))


def speed_with(o, empty):
    modes = {"off": "off", "calls": ("calls", empty, {"EMPTY_EVENTS": str(API)}), "kernels": ("kernels", empty, {"EMPTY_EVENTS": str(KERNELS)}),
             "default": "default", "net": "net", "all": "all"}
    names, jobs = list(modes), []
    try:
        # One process is faster than another by a percent or two, whatever it does, so those that are compared to a part
        # of a percent have several.
        jobs = [(m, Job(o, "turns", modes[m])) for k in range(o.copies) for m in names if k == 0 or m in ("off", "calls", "default")]
        said = [j.answer("ANSWER ") for _, j in jobs][0]
        print(f"\n## Overhead in turn, medians (NCCL {said['nccl']}, torch {said['torch']}, {o.gpus} GPUs); raw is ncclAllReduce called directly. calls and kernels: a plugin "
              f"that does nothing, asking for calls, or for kernels too; default, net, all: Lockstep's. {o.copies} jobs each of off, calls and default, one of the others; ±: half of what lies between jobs without")
        print(f"{'':12} {'off µs':>10} " + "".join(f"{m:>18}" for m in names[1:]) + "   ± of off   the call alone, ns more than off: " + " ".join(names[1:]))
        for what, size, n, rounds in SWEEP:
            if o.sizes and line(what, size) not in o.sizes:
                continue
            got, rounds = [[] for _ in jobs], max(1, round(rounds * o.rounds))
            each = [j.ask(what, size, n)["us"] for _, j in jobs]  # the first round does not count
            for k in range(VISITS if o.warm else rounds):
                for i in range(len(jobs)):
                    i = (i + k) % len(jobs)
                    if o.warm:
                        jobs[i][1].ask(what, size, math.ceil(o.warm * 1e6 / each[i]))
                    got[i] += [jobs[i][1].ask(what, size, n) for _ in range(math.ceil(rounds / VISITS) if o.warm else 1)]

            def of(m, key):
                """The medians of the mode's jobs."""
                return [statistics.median(a[key] for a in g) for (name, _), g in zip(jobs, got) if name == m]
            us = {m: statistics.median(of(m, "us")) for m in names}
            call = {m: statistics.median(of(m, "calls_us")) for m in names}
            spread = 100 * (max(of("off", "us")) - min(of("off", "us"))) / 2 / us["off"]
            more = "".join(f"{1e3 * (us[m] - us['off']):+9.0f} ns {100 * (us[m] / us['off'] - 1):+5.2f}%" for m in names[1:])
            print(f"{line(what, size):12} {us['off']:10.2f} {more}   {spread:6.2f}%   " + " ".join(f"{1e3 * (call[m] - call['off']):+6.0f}" for m in names[1:]), flush=True)
            if what == "steps":
                print(f"{'steps/s':12} " + " ".join(f"{m} {1e6 / us[m]:.2f}" for m in names))
    finally:
        for _, j in jobs:
            j.end()


def empty_switch(job):
    """Kernels, or calls only, for a job with the empty plugin."""
    def turn(kernels):
        path = os.path.join(job.dir.name, "switch")
        with open(path + ".new", "w") as f:
            f.write(str(KERNELS if kernels else API))
        os.replace(path + ".new", path)
    return turn


def lockstep_switch(job):
    """Every operation timed (net), or the default, for a job with Lockstep's."""
    def turn(net):
        for path in glob.glob(os.path.join(job.dir.name, "**", "*.ctl"), recursive=True):
            with open(path, "r+b") as f:
                f.seek(16)  # events of struct lockstep_control: LOCKSTEP_EVENTS_NET, LOCKSTEP_EVENTS_DEFAULT
                f.write(struct.pack("<I", 2 if net else 0))
    return turn


def switch(o):
    """What timing costs within one process: there is no luck of one process beside another in it."""
    with tempfile.TemporaryDirectory() as d:
        empty = empty_plugin(d)
        for name, mode, turns, words in (("empty plugin", ("switch", empty, {"EMPTY_EVENTS": str(API)}), empty_switch, ("calls only", "kernels asked for")),
                                         ("Lockstep", "default", lockstep_switch, ("default", "every operation timed"))):
            jobs = []
            try:
                for _ in range(o.copies):
                    jobs.append(Job(o, "turns", mode, {"EMPTY_SWITCH": "switch"} if mode != "default" else None))
                for j in jobs:
                    j.answer("ANSWER ")
                for j in jobs:
                    turn, got = turns(j), ([], [])
                    for k in range(max(2, round(10 * o.rounds))):
                        for on in ((False, True) if k % 2 else (True, False)):
                            turn(on)
                            j.ask("steps", 0, 300)
                            got[on].append(j.ask("steps", 0, 200)["us"])
                    off, on = (statistics.median(g) for g in got)
                    more = [100 * (b / a - 1) for a, b in zip(*got)]
                    print(f"{name:14} steps: {words[0]} {off:8.1f} µs, {words[1]} {on:8.1f} µs: {statistics.median(more):+.2f} % (each turn {min(more):+.1f} to {max(more):+.1f})", flush=True)
            finally:
                for j in jobs:
                    j.end()


def ebpf_accounting(o, runtime):
    got = job(o, "accounting", "off", {"LOCKSTEP_RUNTIME_DIR": runtime, "LOCKSTEP_JOB": "measure", "MEASURE_STEPS": "100"})
    print("\n## eBPF: what the agent recorded of a job without the plugin")
    print(f"{'':26} {'issued':>8} {'numbered':>8} {'lost':>5}")
    for s in got["result"]:
        print(f"{s['section']:26} {s['issued']:8} {s['numbered']:8} {s['lost']:5}" if "issued" in s else f"{s['section']:26} failed: {s['failed']}")
    print({k: v for k, v in got["counters"].items() if "lost" in k or k in ("source", "dropped")})


def ebpf(o):
    """What the agent's probes cost a call: with the agent, without it, and again."""
    with tempfile.TemporaryDirectory(prefix="lockstep-", dir="/dev/shm") as runtime:
        def agent():
            p = subprocess.Popen([o.lockstep, "agent", "--node", "node", "--runtime-dir", runtime, "--ebpf.watch", "--ebpf.job", "measure", "--no-gpu.watch", "--no-nic.watch",
                                  "--web.listen-address", "127.0.0.1:29699"], stderr=subprocess.PIPE, text=True)
            kept = []
            threading.Thread(target=Job.drain, args=(p.stderr, kept), daemon=True).start()
            time.sleep(3)
            return p, kept

        p, kept = agent()
        try:
            ebpf_accounting(o, runtime)
        except Exception as e:
            print(f"\n## eBPF, accounting: {type(e).__name__}: {e}")
        j = Job(o, "turns", "off")
        try:
            j.answer("ANSWER ")
            points = [("raw", 8, 1000), ("raw", 1 << 20, 1000), ("torch", 8, 500), ("steps", 0, 50)]
            got = {True: {}, False: {}}
            for k in range(6):
                on = k % 2 == 0
                for what, size, n in points:
                    rows = [j.ask(what, size, n) for _ in range(7)][2:]
                    got[on].setdefault((what, size), []).extend(rows)
                if k == 0:
                    with urllib.request.urlopen("http://127.0.0.1:29699/metrics", timeout=5) as f:
                        told = [x for x in f.read().decode().splitlines() if ("ebpf" in x or "lockstep_source" in x or "collectives_total" in x or "recorder" in x) and not x.startswith("#")]
                if on:
                    p.terminate()
                    p.wait(timeout=20)
                    time.sleep(1)
                elif k < 5:
                    p, kept = agent()
            print("\n## eBPF: the agent's probes on libnccl, off and on in turn, medians")
            print(f"{'':12} {'off':>12} {'on':>12}           the call alone: off, on, on - off ns")
            for what, size, _ in points:
                off, on = ([statistics.median(r[k] for r in got[m][what, size]) for k in ("us", "calls_us")] for m in (False, True))
                print(f"{line(what, size):12} {off[0]:9.2f} µs {on[0]:9.2f} µs {100 * (on[0] / off[0] - 1):+6.2f}%   {off[1]:8.3f} {on[1]:8.3f} {1e3 * (on[1] - off[1]):+7.0f}")
            print("\n".join(told))
        finally:
            p.kill()
            j.end()
            print("the agent said:\n" + "".join(kept[-12:]))


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--plugin", default=os.path.join(HERE, "../../bin/libnccl-profiler-lockstep.so"))
    a.add_argument("--lockstep", default=os.path.join(HERE, "../../bin/lockstep"), help="for what the eBPF probes cost")
    a.add_argument("--gpus", type=int, default=2)
    a.add_argument("--steps", type=int, default=2000, help="of training whose collectives are counted")
    a.add_argument("--events", nargs="+", default=["default", "all"])
    a.add_argument("--rounds", type=float, default=1, help="more or fewer rounds of off, on, all in turn: a factor")
    a.add_argument("--warm", type=float, default=1.5, help="seconds of the same calls before each visit to a job whose speed is compared: what a long run has; 0: what a burst has after a rest")
    a.add_argument("--copies", type=int, default=3, help="jobs each, of those whose speed is compared most closely")
    a.add_argument("--sizes", nargs="*", default=[], help="rows of the table of speed, such as 'raw 8' or steps; all without")
    a.add_argument("--port", type=int, default=29700)
    a.add_argument("--timeout", type=int, default=300, help="seconds for one job, or for what it is asked next")
    a.add_argument("--only", nargs="+", choices=["accounting", "durations", "selfsend", "sockets", "speed", "switch", "ebpf"], default=["accounting", "durations", "selfsend", "sockets", "speed"])
    o = a.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    if not os.path.exists(o.plugin):
        raise SystemExit(f"no plugin at {o.plugin}: make build, or --plugin")
    bad = []
    for part in o.only:
        try:
            if {"accounting": accounting, "durations": durations, "selfsend": selfsend, "sockets": sockets, "speed": speed, "switch": switch, "ebpf": ebpf}[part](o):
                bad.append(part)
        except Exception as e:  # the other parts are worth having
            print(f"\n## {part}: {type(e).__name__}: {e}")
            bad.append(part)
        sys.stdout.flush()
    if bad:
        raise SystemExit(f"\nFAILED: {', '.join(bad)}: something is missing above")


if __name__ == "__main__":
    main()
