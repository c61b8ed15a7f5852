#!/usr/bin/env bash
# Several hosts: one router in front of all prefill and decode servers.
set -euo pipefail
PREFILL_HOSTS=${PREFILL_HOSTS:-"prefill-1 prefill-2"} # names or addresses that decode reaches too
DECODE_HOSTS=${DECODE_HOSTS:-"decode-1"}
SERVER_PORT=${SERVER_PORT:-30000}
BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998} # that of the prefill servers
HOST=${HOST:-0.0.0.0}
PORT=${PORT:-8000}

servers=()
for host in $PREFILL_HOSTS; do servers+=(--prefill "http://$host:$SERVER_PORT" "$BOOTSTRAP_PORT"); done
for host in $DECODE_HOSTS; do servers+=(--decode "http://$host:$SERVER_PORT"); done

exec python3 -m sglang_router.launch_router --pd-disaggregation "${servers[@]}" \
  --host "$HOST" --port "$PORT" "$@"
