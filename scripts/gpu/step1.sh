#!/usr/bin/env bash
# First step on a GPU host without network: unpack the base archive, byte-compile. Needs OUT/b of bundle.sh.
# usage: scripts/gpu/step1.sh [OUT]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
mkdir -p "$DSPARK_CP_HOME"/{site,cache}
tar -xJf "${1:-.gpu}/b/B.tar.xz" -C "$DSPARK_CP_HOME/site" 2>/dev/null ||
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' \
    "${1:-.gpu}/b/B.tar.xz" "$DSPARK_CP_HOME/site"
cd "$DSPARK_CP_HOME/site"
python3 -m compileall -q -j 0 sglang/srt sglang/kernels sglang/*.py flashinfer/*.py flashinfer/jit fastapi starlette pydantic \
  openai compressed_tensors tvm_ffi sgl_kernel transformers/*.py transformers/utils transformers/models/auto >/dev/null 2>&1 || true
