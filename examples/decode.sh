#!/usr/bin/env bash
# One host: decode, data-parallel attention on the next TP GPUs. `decode.sh check` asks `doctor` and starts nothing.
set -euo pipefail
MODEL=${MODEL:-/models/deepseek-v4-dspark} # the same checkpoint as prefill
TP=${TP:-4}                                # GPUs, also the DP size
GPUS=${GPUS:-$(seq -s, "$TP" $((2 * TP - 1)))}
TRANSFER=${TRANSFER:-mooncake_tcp} # the same as prefill
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-31000} # PORT + 233 to PORT + 239 are used on loopback too

export CUDA_VISIBLE_DEVICES=$GPUS
server=(python3 -m sglang.launch_server --model-path "$MODEL"
  --host "$HOST" --port "$PORT" --tp "$TP" --dp "$TP"
  --enable-dp-attention --enable-dp-lm-head
  --speculative-algorithm DSPARK
  --disaggregation-mode decode --disaggregation-transfer-backend "$TRANSFER")
if [ "${1:-}" = check ]; then
  exec sglang-dspark-cp doctor -- "${server[@]}"
fi
exec "${server[@]}" "$@"
