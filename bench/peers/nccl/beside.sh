#!/bin/sh
# What a program's communication costs a GEMM on the same GPUs:
#   beside.sh FOLDER GPUS PROGRAM...
# FOLDER is where build.sh put nccl and libgemm.so. The GEMM runs alone for a few
# seconds, then inside PROGRAM's ranks, which should communicate for some seconds
# more than they take to start. One line of JSON on standard output: the medians
# over GPUs and half seconds. PROGRAM's own output goes to standard error.
set -eu
[ $# -ge 3 ] || { echo "usage: beside.sh FOLDER GPUS PROGRAM..." >&2; exit 2; }
folder=$(cd "$1" && pwd) gpus=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# median FILE...: of the tflops in them.
median() {
  cat "$@" | sed -n 's/.*"tflops":\([0-9.]*\).*/\1/p' | sort -n |
    awk '{ v[NR] = $1 } END { if (NR == 0) exit 1; print v[int((NR + 1) / 2)] }'
}

# As many hardware queues as there are: with the default of 8 the GEMM's stream
# shares one with a stream that waits for a peer, and each holds up the other. And
# all kernels loaded at once: loading one later waits for those that run.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}" CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-EAGER}"
timeout 60 "$folder/nccl" -gemm-only -g "$gpus" -gemm-size "${GEMM_SIZE:-8192}" -seconds 5 >"$work/alone"
sed -n p "$work/alone" >&2
alone=$(median "$work/alone")
GEMM_OUT="$work/beside" LD_PRELOAD="$folder/libgemm.so" timeout "${BESIDE_LIMIT:-300}" "$@" >&2
beside=$(median "$work"/beside.*)
awk -v a="$alone" -v b="$beside" 'BEGIN { printf "{\"test\":\"gemm_beside\",\"gemm_alone_tflops\":%.1f,\"gemm_beside_tflops\":%.1f,\"gemm_percent\":%.1f}\n", a, b, 100 * b / a }'
