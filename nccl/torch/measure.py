#!/usr/bin/env python3
"""What the NCCL profiler plugin sees of a PyTorch job, and what it costs.

    make build && python3 nccl/torch/measure.py            on a machine with two GPUs or more

prints tables: collectives recorded ÷ issued by kind of call (DDP with tensor parallelism, all kinds,
CUDA graphs, all_to_all, send/recv), durations beside CUDA events, transfers over sockets, and times by
size and steps a second with the plugin off, on and with all events, in turn. It exits with 1 when a
collective is neither recorded nor counted.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def job(o, what, mode, env=None):
    """Runs worker.py on every GPU; mode is off, default or all."""
    with tempfile.TemporaryDirectory(prefix="lockstep-", dir="/dev/shm") as runtime:
        base = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(o.port), WORLD_SIZE=str(o.gpus), PYTHONUNBUFFERED="1",
                    LOCKSTEP_RUNTIME_DIR=runtime, LOCKSTEP_JOB="measure", LOCKSTEP_NCCL_EVENTS=mode)
        base.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not what is measured, and not allowed everywhere
        base["NCCL_PROFILER_PLUGIN"] = "none" if mode == "off" else os.path.abspath(o.plugin)
        base.update(env or {})
        o.port += 1
        ranks = [subprocess.Popen([sys.executable, os.path.join(HERE, "worker.py"), what], stdout=subprocess.PIPE, text=True,
                                  env=dict(base, RANK=str(r), LOCAL_RANK=str(r))) for r in range(o.gpus)]
        try:
            out = [p.communicate(timeout=o.timeout)[0] for p in ranks]
        finally:
            for p in ranks:
                p.kill()
        if any(p.returncode for p in ranks):
            raise SystemExit(f"{what}, plugin {mode}: a rank failed: {[p.returncode for p in ranks]}\n{''.join(out)}")
        for line in out[0].splitlines():
            if line.startswith("RESULT "):
                return json.loads(line[len("RESULT "):])
    raise SystemExit(f"{what}, plugin {mode}: no result:\n{out[0]}")


def size_name(n):
    for unit, k in (("G", 30), ("M", 20), ("K", 10)):
        if n >> k:
            return f"{n >> k}{unit}"
    return str(n)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--plugin", default=os.path.join(HERE, "../../bin/libnccl-profiler-lockstep.so"))
    a.add_argument("--gpus", type=int, default=2)
    a.add_argument("--rounds", type=int, default=3, help="of off, on, all in turn")
    a.add_argument("--port", type=int, default=29700)
    a.add_argument("--timeout", type=int, default=300, help="seconds for one job")
    a.add_argument("--only", choices=["accounting", "durations", "sockets", "speed"])
    o = a.parse_args()
    if not os.path.exists(o.plugin):
        raise SystemExit(f"no plugin at {o.plugin}: make build, or --plugin")
    want = lambda part: o.only in (None, part)
    bad = False

    if want("accounting"):
        for events in ("default", "all"):
            got = job(o, "accounting", events)
            c = got["counters"]
            print(f"\n## Recorded ÷ issued (NCCL {got['nccl']}, torch {got['torch']}, {o.gpus} GPUs, events {events}, interface v{c['version']})")
            print(f"{'':22} {'issued':>8} {'numbered':>8} {'recorded':>8} {'no end':>7} {'lost':>5} {'open':>5} {'over-':>6}  ratio")
            for s in got["result"]:
                ratio = (s["ended"] + s["overwritten"] // 3) / max(s["issued"], 1)
                print(f"{s['section']:22} {s['issued']:8} {s['numbered']:8} {s['ended']:8} {s['unseen']:7} {s['lost']:5} {s['open']:5} {s['overwritten']:6}  {100 * ratio:.2f} %")
                bad |= s["numbered"] != s["issued"] or s["ended"] + s["lost"] + s["overwritten"] // 3 < s["issued"]
            print(f"events lost {c['events_lost']}, of other processes {c['events_foreign']}")
    if want("durations"):
        got = job(o, "durations", "default")
        print(f"\n## Durations of an all-reduce, µs: GPU stamps of the kernel beside CUDA events around the call")
        print(f"{'bytes':>8} {'stamps':>10} {'events':>10} {'error, median':>14} {'p99':>10}")
        for r in got["result"]:
            if "missing" in r:
                bad = True
                print(f"{size_name(r['size']):>8} {r['missing']} of them are missing")
            else:
                print(f"{size_name(r['size']):>8} {r['ours_us']:10.2f} {r['events_us']:10.2f} {r['err_median_us']:14.2f} {r['err_p99_us']:10.2f}")
    if want("sockets"):
        got = job(o, "accounting", "all", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"})
        print("\n## Over sockets: what rank 0 saw of each connection")
        for k in got["conns"]:
            print(f"peer {k['peer']:3} {k['name']:24} sent {k['posted']:>14} taken {k['completed']:>14} received {k['received']:>14} B, {k['bps'] / 1e9:.3f} GB/s, {k['latency_ns'] / 1e3:.1f} µs, {k['windows']} windows, {k['slow']} slow")
        bad |= not got["conns"]
    if want("speed"):
        runs = {"off": [], "default": [], "all": []}
        for _ in range(o.rounds):
            for mode in runs:
                runs[mode].append(job(o, "speed", mode)["result"])
        mid = {m: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for m, rs in runs.items()}
        print(f"\n## Overhead: median of {o.rounds} rounds of off, on, all in turn")
        print(f"{'bytes':>8} {'off':>12} {'on':>12} {'all':>12}      on     all   ns a call")
        for k, off in mid["off"].items():
            on, all_ = mid["default"][k], mid["all"][k]
            if k == "steps":
                print(f"{'steps/s':>8} {off:12.2f} {on:12.2f} {all_:12.2f} {100 * (off / on - 1):+6.2f}% {100 * (off / all_ - 1):+6.2f}%")
            else:
                print(f"{size_name(int(k)):>8} {off:9.2f} µs {on:9.2f} µs {all_:9.2f} µs {100 * (on / off - 1):+6.2f}% {100 * (all_ / off - 1):+6.2f}% {1e3 * (on - off):8.0f}")
    if bad:
        raise SystemExit("\nFAILED: something is missing above")


if __name__ == "__main__":
    main()
