#!/usr/bin/env bash
# Several hosts: one prefill server, TP8/CP8, the whole host. Start it on each prefill host.
# `prefill.sh check` asks `doctor` and starts nothing.
set -euo pipefail
MODEL=${MODEL:-/models/deepseek-v4-dspark} # folder of a DeepSeek-V4 checkpoint with its DSpark draft (mtp.*)
TP=${TP:-8}                                # GPUs of this host, also the CP size; 2 to 8
TRANSFER=${TRANSFER:-mooncake}             # RDMA; mooncake_tcp for TCP; the same on all hosts
IB_DEVICE=${IB_DEVICE:-}                   # for example mlx5_0,mlx5_1; empty: Mooncake looks itself
HOST_IP=${HOST_IP:-}                       # address of this host that the others reach; empty: SGLang looks itself
PORT=${PORT:-30000}
BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998}
CHUNK=${CHUNK:-8192} # tokens of a forward, a multiple of 256

if [ -n "$HOST_IP" ]; then export SGLANG_HOST_IP=$HOST_IP; fi
server=(python3 -m sglang.launch_server --model-path "$MODEL"
  --host 0.0.0.0 --port "$PORT" --tp "$TP"
  --enable-prefill-cp --cp-strategy interleave
  --speculative-algorithm DSPARK --chunked-prefill-size "$CHUNK"
  --disaggregation-mode prefill --disaggregation-transfer-backend "$TRANSFER"
  --disaggregation-bootstrap-port "$BOOTSTRAP_PORT")
if [ -n "$IB_DEVICE" ]; then server+=(--disaggregation-ib-device "$IB_DEVICE"); fi
if [ "${1:-}" = check ]; then
  exec sglang-dspark-cp doctor -- "${server[@]}"
fi
exec "${server[@]}" "$@"
