#!/usr/bin/env bash
# First step on a GPU host without network: unpack the base archive, byte-compile. Needs OUT/b of bundle.sh; about 10 s.
# usage: scripts/gpu/step1.sh [OUT]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
mkdir -p "$DSPARK_CP_HOME"/{site,cache}
python3 -m tarfile -e "${1:-.gpu}/b/B.tar.xz" "$DSPARK_CP_HOME/site"
cd "$DSPARK_CP_HOME/site"
# A module that does not compile is not used here; what is missing is compiled at import.
python3 -m compileall -q -j 0 sglang/srt sglang/kernels sglang/*.py flashinfer/*.py flashinfer/jit fastapi starlette \
  pydantic openai compressed_tensors tvm_ffi sgl_kernel transformers/*.py transformers/utils transformers/models/auto \
  >/dev/null 2>&1 || true
echo "step 1 done: $(du -sh "$DSPARK_CP_HOME/site" | cut -f1)"
