#!/bin/sh
# Builds nccl and libgemm.so where CUDA and NCCL are: build.sh [FOLDER] (default: .).
# NCCL is looked for in NCCL_HOME, in Python's packages (nvidia.nccl, then torch's
# own libraries), and in the system. nvcc: NVCC, PATH, /usr/local/cuda.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-.}

fail() { echo "build.sh: $*" >&2; exit 1; }

nvcc=${NVCC:-$(command -v nvcc || true)}
[ -n "$nvcc" ] || nvcc=/usr/local/cuda/bin/nvcc
[ -x "$nvcc" ] || fail "no nvcc in PATH or /usr/local/cuda (NVCC may name it)"

# Folders that may hold what pip installed, one a line.
sites=$(python3 - <<'PY' 2>/dev/null || true
import os, site, sys, sysconfig
found = []
try:
    import nvidia
    found += [os.path.dirname(p) for p in nvidia.__path__]
except Exception:
    pass
found += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
try:
    found += site.getsitepackages()
except Exception:
    pass
found += sys.path
for p in dict.fromkeys(p for p in found if p and os.path.isdir(p)):
    print(p)
PY
)

# first PATH...: the first that exists.
first() { for f; do [ -e "$f" ] && { echo "$f"; return; }; done; return 0; }

IFS='
'
header='' library='' cublas=''
[ -z "${NCCL_HOME:-}" ] || {
  header=$(first "$NCCL_HOME/include/nccl.h")
  library=$(first "$NCCL_HOME"/lib/libnccl.so.2 "$NCCL_HOME"/lib/libnccl.so "$NCCL_HOME"/lib64/libnccl.so.2)
}
for s in $sites; do
  [ -n "$header" ] || header=$(first "$s"/nvidia/nccl/include/nccl.h "$s"/nvidia/cu*/include/nccl.h)
  [ -n "$library" ] || library=$(first "$s"/nvidia/nccl/lib/libnccl.so.2 "$s"/nvidia/cu*/lib/libnccl.so.2 "$s"/torch/lib/libnccl.so.2)
  [ -n "$cublas" ] || cublas=$(first "$s"/nvidia/cublas/lib/libcublas.so.* "$s"/nvidia/cu*/lib/libcublas.so.* "$s"/torch/lib/libcublas.so.*)
done
toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -n "$header" ] || header=$(first /usr/include/nccl.h /usr/local/include/nccl.h "$toolkit"/include/nccl.h)
[ -n "$library" ] || library=$(first /usr/lib/x86_64-linux-gnu/libnccl.so.2 /usr/lib/aarch64-linux-gnu/libnccl.so.2 /usr/lib64/libnccl.so.2 /usr/local/lib/libnccl.so.2 "$toolkit"/lib64/libnccl.so.2)
[ -n "$cublas" ] || cublas=$(first "$toolkit"/lib64/libcublas.so.* "$toolkit"/targets/*/lib/libcublas.so.* /usr/lib/x86_64-linux-gnu/libcublas.so.*)
[ -n "$header" ] || fail "no nccl.h (NCCL_HOME may name NCCL's folder)"
[ -n "$library" ] || fail "no libnccl.so.2 (NCCL_HOME may name NCCL's folder)"
echo "build.sh: $nvcc; $header; $library; cuBLAS: ${cublas:-left to the loader}" >&2

# nvcc takes no libnccl.so.2 for a library, and pip's packages have no libnccl.so.
libdir=$(dirname "$library")
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
ln -s "$(readlink -f "$library")" "$links/libnccl.so"
mkdir -p "$out"
set -- -O2 -std=c++17 --threads 0 \
  -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90
[ -z "$cublas" ] || set -- -DCUBLAS_LIBRARY="\"$cublas\"" "$@"

"$nvcc" "$@" -shared -Xcompiler -fPIC -o "$out/libgemm.so" "$here/gemm.cu" -ldl -lpthread &
gemm=$!
"$nvcc" "$@" -I"$(dirname "$header")" -o "$out/nccl" "$here/nccl.cu" \
  -L"$links" -lnccl -Xlinker -rpath -Xlinker "$libdir" -ldl -lpthread
wait "$gemm"
