#!/usr/bin/env bash
# The runs of `benchmark/results/smoke-cuda-2xh200-*` and `cp_gather-2xh200-*`, several pairs of servers at a time.
# usage: scripts/gpu/two.sh STEP ...
#   servers   bf16 with all set-ups and controls; beside it what stock refuses, then fp8 without controls: 6 to 10 min
#             with JIT caches    needs step1.sh and step2.sh
#   modes     --mode kv, context and packed side by side, one-GPU prefill and CP2 -> TP2, no controls    needs the same
#   gather    benchmark/cp_gather at cp 2, both H: about 2 min    needs torch and triton
# Environment:
#   OUT               where results and logs go (default: $DSPARK_CP_HOME/runs/two): NAME.json, NAME-logs.tar.xz, NAME.txt
#   LIMIT             seconds of one step (default 570); a run that is interrupted reports what it has
#   CACHES=1          K.tar.xz too: the JIT caches, for step2.sh of the next host
#   DSPARK_CP_COMMIT  what the results name as commit where there is no git
# Exit status: 0 every run was ok, 1 one was not, 2 usage.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
[ $# -gt 0 ] || { echo "two.sh: name the steps: servers modes gather" >&2; exit 2; }
for step in "$@"; do
  case $step in servers | modes | gather) ;; *) echo "two.sh: unknown step $step; allowed are servers, modes, gather" >&2; exit 2 ;; esac
done
limit=${LIMIT:-570}
[[ $limit =~ ^[1-9][0-9]*$ ]] || { echo "two.sh: LIMIT=$limit: allowed is a whole number of seconds" >&2; exit 2; }
export OUT=${OUT:-$DSPARK_CP_HOME/runs/two}
mkdir -p "$OUT" || exit 1
caches=${CACHES:-0}

# A run of smoke. Runs at the same time take ports far apart, below those that the kernel gives to outgoing connections.
# usage: smoke NAME FIRST_PORT [OPTION ...]
smoke() {
  local name=$1 port=$2 left=$((limit - 25 - (SECONDS - began))) status
  shift 2
  rm -rf "${DSPARK_CP_HOME:?}/runs/$name" "$OUT/$name.json"
  [ "$left" -ge 30 ] || { echo "== $name: left out, $left s are too few"; return 1; }
  CACHES=0 LIMIT=$left scripts/gpu/run-smoke.sh "$name" --gpus 0,1 --ports "$port" "$@" >"$OUT/$name.txt" 2>&1
  status=$?
  echo "== $name: status $status after $((SECONDS - began)) s"
  [ "$status" = 0 ] || tail -n 5 "$OUT/$name.txt"
  return "$status"
}

all_of() {
  local process worst=0
  for process in "$@"; do wait "$process" || worst=1; done
  return "$worst"
}

servers() {
  scripts/gpu/plugin.sh || return 1
  smoke bf16 30000 &
  local first=$!
  # Two runs at a time, as they were tried: fp8 waits for stock.
  (smoke stock 12000 --stock; stock=$?; smoke fp8 20000 --quant fp8 --no-controls && [ "$stock" = 0 ]) &
  all_of "$first" $!
}

modes() {
  scripts/gpu/plugin.sh || return 1
  local port=12000 mode started=()
  for mode in kv context packed; do
    smoke "mode-$mode" "$port" --mode "$mode" --pairs pd1,cp2-tp2 --no-controls &
    started+=($!)
    port=$((port + 6000))
  done
  all_of "${started[@]}"
}

gather() {
  local left=$((limit - 25))
  [ "$left" -ge 30 ] || { echo "== gather: left out, $left s are too few"; return 1; }
  timeout --foreground --signal=INT --kill-after=30 "$limit" python3 benchmark/cp_gather/cp_gather.py --cp 2 \
    --tokens 1K 4K 8K 16K 64K --timeout "$left" --runs 24 \
    --json "$OUT/gather.json" >"$OUT/gather.txt" 2>&1
  local status=$?
  tail -n 40 "$OUT/gather.txt"
  return "$status"
}

failed=0
for step in "$@"; do
  began=$SECONDS
  "$step" || failed=1
  echo "== $step: $((SECONDS - began)) s"
done
if [ "$caches" != 0 ]; then scripts/gpu/caches.sh "$OUT/K.tar.xz" || failed=1; fi
exit "$failed"
