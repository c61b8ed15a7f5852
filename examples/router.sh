#!/usr/bin/env bash
# One host: the router in front of prefill.sh and decode.sh.
set -euo pipefail
PREFILL=${PREFILL:-http://127.0.0.1:30000}
BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998} # that of prefill
DECODE=${DECODE:-http://127.0.0.1:31000}
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}

exec python3 -m sglang_router.launch_router --pd-disaggregation \
  --prefill "$PREFILL" "$BOOTSTRAP_PORT" --decode "$DECODE" \
  --host "$HOST" --port "$PORT" "$@"
