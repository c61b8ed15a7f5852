#!/usr/bin/env bash
# Several hosts: one decode server, TP8/DP8, the whole host. `decode.sh check` asks `doctor` and starts nothing.
set -euo pipefail
MODEL=${MODEL:-/models/deepseek-v4-dspark} # the same checkpoint as prefill
TP=${TP:-8}                                # GPUs of this host, also the DP size
TRANSFER=${TRANSFER:-mooncake}             # RDMA; mooncake_tcp for TCP; the same on all hosts
IB_DEVICE=${IB_DEVICE:-}                   # for example mlx5_0,mlx5_1; empty: Mooncake looks itself
HOST_IP=${HOST_IP:-}                       # address of this host that the others reach; empty: SGLang looks itself
PORT=${PORT:-30000}

if [ -n "$HOST_IP" ]; then export SGLANG_HOST_IP=$HOST_IP; fi
server=(python3 -m sglang.launch_server --model-path "$MODEL"
  --host 0.0.0.0 --port "$PORT" --tp "$TP" --dp "$TP"
  --enable-dp-attention --enable-dp-lm-head
  --speculative-algorithm DSPARK
  --disaggregation-mode decode --disaggregation-transfer-backend "$TRANSFER")
if [ -n "$IB_DEVICE" ]; then server+=(--disaggregation-ib-device "$IB_DEVICE"); fi
if [ "${1:-}" = check ]; then
  exec sglang-dspark-cp doctor -- "${server[@]}"
fi
exec "${server[@]}" "$@"
