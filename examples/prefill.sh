#!/usr/bin/env bash
# One host: prefill, context parallel over the first TP GPUs. `prefill.sh check` asks `doctor` and starts nothing.
set -euo pipefail
MODEL=${MODEL:-/models/deepseek-v4-dspark} # folder of a DeepSeek-V4 checkpoint with its DSpark draft (mtp.*)
TP=${TP:-4}                                # GPUs, also the CP size; 2 to 8
GPUS=${GPUS:-$(seq -s, 0 $((TP - 1)))}
TRANSFER=${TRANSFER:-mooncake_tcp} # or mooncake (RDMA); the same on decode
HOST=${HOST:-127.0.0.1}            # the bootstrap server listens there too
PORT=${PORT:-30000}
BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998}
CHUNK=${CHUNK:-8192} # tokens of a forward, a multiple of 256

export CUDA_VISIBLE_DEVICES=$GPUS
server=(python3 -m sglang.launch_server --model-path "$MODEL"
  --host "$HOST" --port "$PORT" --tp "$TP"
  --enable-prefill-cp --cp-strategy interleave
  --speculative-algorithm DSPARK --chunked-prefill-size "$CHUNK"
  --disaggregation-mode prefill --disaggregation-transfer-backend "$TRANSFER"
  --disaggregation-bootstrap-port "$BOOTSTRAP_PORT")
if [ "${1:-}" = check ]; then
  exec sglang-dspark-cp doctor -- "${server[@]}"
fi
exec "${server[@]}" "$@"
