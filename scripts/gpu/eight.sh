#!/usr/bin/env bash
# The run on all GPUs of one host: CPn prefill beside TPn and TPn/DPn decode, the gather at every size, the cost of
# DSpark on prefill. Written for eight GPUs, for 2 and 4 too; on one GPU it only tries the programs.
# usage: scripts/gpu/eight.sh [STEP ...]     steps: smoke gather prefill (default: all three, in the order given)
#   smoke     `smoke --device cuda` with all set-ups and controls, in bf16     needs step1.sh and step2.sh
#   gather    benchmark/cp_gather at cp 8, 4, 2, T = 8K first                  needs nothing but torch and triton
#   prefill   benchmark/prefill_cost: DSPARK off and on, each gather mode      needs step1.sh and step2.sh
# A step that fails or runs out of time does not end the others, and what it had measured is kept.
# Environment:
#   GPUS            how many, 1 2 4 8 (default: all visible); the first ones are taken
#   RANKS_PER_GPU   ranks of prefill and of decode on each GPU (default 1; 2 where GPUS is 1): for smoke and prefill
#   OUT             where the results go (default: $DSPARK_CP_HOME/runs/eight): smoke.json gather.json prefill.json
#                   steps.json logs.tar.xz
#   CACHES=1        K.tar.xz too: the JIT caches, for step2.sh of the next host
#   SMOKE_LIMIT GATHER_LIMIT PREFILL_LIMIT   seconds of each step (default 560 each)
#   LIMIT           seconds of all steps together (default: none); a step gets what is left of it
#   SMOKE_ARGS GATHER_ARGS PREFILL_ARGS      further options of the programs
#   DSPARK_CP_COMMIT    what the results name as commit where there is no git
# Exit status: 0 all steps were ok, 1 one was not, 2 usage.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
repository=$PWD
. scripts/gpu/env.sh

usage() {
  echo "eight.sh: $1" >&2
  exit 2
}

number() { [[ $2 =~ ^[1-9][0-9]*$ ]] || usage "$1=$2: allowed is a whole number of seconds"; }

steps=("$@")
[ $# -gt 0 ] || steps=(smoke gather prefill)
for step in "${steps[@]}"; do
  case $step in smoke | gather | prefill) ;; *) usage "unknown step $step; allowed are smoke, gather, prefill" ;; esac
done
if [ -z "${GPUS:-}" ]; then
  command -v nvidia-smi >/dev/null || usage "nvidia-smi is not here: no GPU, or give GPUS"
  GPUS=$(nvidia-smi --query-gpu=index --format=csv,noheader | grep -c .)
fi
case $GPUS in 1 | 2 | 4 | 8) ;; *) usage "GPUS=$GPUS: allowed are 1, 2, 4 and 8" ;; esac
RANKS_PER_GPU=${RANKS_PER_GPU:-$((GPUS == 1 ? 2 : 1))}
case $RANKS_PER_GPU in 1 | 2 | 4 | 8) ;; *) usage "RANKS_PER_GPU=$RANKS_PER_GPU: allowed are 1, 2, 4 and 8" ;; esac
ranks=$((GPUS * RANKS_PER_GPU))
[ "$ranks" -ge 2 ] && [ "$ranks" -le 8 ] || usage "GPUS=$GPUS RANKS_PER_GPU=$RANKS_PER_GPU: allowed are 2 to 8 ranks"
SMOKE_LIMIT=${SMOKE_LIMIT:-560} GATHER_LIMIT=${GATHER_LIMIT:-560} PREFILL_LIMIT=${PREFILL_LIMIT:-560}
for name in SMOKE_LIMIT GATHER_LIMIT PREFILL_LIMIT; do number "$name" "${!name}"; done
[ -z "${LIMIT:-}" ] || number LIMIT "$LIMIT"
began=$SECONDS
overall=${LIMIT:-}
gpus=$(seq -s, 0 $((GPUS - 1)))

results=${OUT:-$DSPARK_CP_HOME/runs/eight}
work=$DSPARK_CP_HOME/runs/eight-work
rm -rf "$work" "$DSPARK_CP_HOME/runs/eight-smoke"
mkdir -p "$results" "$work/logs" || exit 1
results=$(cd "$results" && pwd) || exit 1
: >"$work/steps.tsv"

note() { printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" >>"$work/steps.tsv"; }

# Seconds that a step may take: its own limit, and no more than what is left of all.
allowed() {
  local own=$1 left
  if [ -n "$overall" ]; then
    left=$((overall - (SECONDS - began)))
    [ "$left" -ge "$own" ] || own=$left
  fi
  echo "$own"
}

# Run a command with its output on the screen and in a log. No pipe: a process that outlives the command would hold it.
logged() {
  local log=$1 status
  shift
  "$@" > >(tee -a "$work/logs/$log") 2>&1
  status=$?
  sleep 0.5 # for the last lines
  return "$status"
}

# The same with a limit, in case a program does not keep its own: an interrupt, then a kill. usage: bounded S LOG CMD...
bounded() { logged "$2" timeout --foreground --signal=INT --kill-after=30 "$1" "${@:3}"; }

smoke() {
  local seconds=$1 status
  # run-smoke.sh interrupts the run itself; the rest of the seconds are for its report, its end and the logs.
  # shellcheck disable=SC2086
  LIMIT=$((seconds - 45)) OUT="$work/smoke" CACHES=0 logged smoke.txt scripts/gpu/run-smoke.sh eight-smoke \
    --gpus "$gpus" --ranks-per-gpu "$RANKS_PER_GPU" --boot-timeout "$((seconds / 2))" ${SMOKE_ARGS:-}
  status=$?
  [ ! -f "$work/smoke/eight-smoke.json" ] || cp "$work/smoke/eight-smoke.json" "$results/smoke.json"
  [ ! -f "$work/smoke/eight-smoke-logs.tar.xz" ] || mv "$work/smoke/eight-smoke-logs.tar.xz" "$work/logs/"
  return "$status"
}

gather() {
  local seconds=$1 ends=$((SECONDS + $1)) worst=0 status left tokens cp sizes=() files=() name
  if [ "$GPUS" = 1 ]; then
    sizes=(8)
  else
    for cp in 8 4 2; do [ "$cp" -gt "$GPUS" ] || sizes+=("$cp"); done
  fi
  # The size that the goals are about comes first, then the rest of each size: time may run out.
  for tokens in "8K" "1K 2K 4K 16K 32K 64K"; do
    for cp in "${sizes[@]}"; do
      left=$((ends - SECONDS))
      name=gather-cp$cp-$([ "$tokens" = 8K ] && echo 8K || echo rest)
      if [ "$left" -lt 45 ]; then
        echo "$name: left out, $left s are too few"
        note "$name" skipped 0 0
        worst=1
        continue
      fi
      local option=--cp
      [ "$GPUS" != 1 ] || option=--emulate-cp
      local started=$SECONDS
      # shellcheck disable=SC2086
      bounded "$left" gather.txt python3 "$repository/benchmark/cp_gather/cp_gather.py" "$option" "$cp" \
        --tokens $tokens --timeout $((left - 25)) --json "$work/$name.json" ${GATHER_ARGS:-}
      status=$?
      note "$name" ran "$status" $((SECONDS - started))
      [ "$status" = 0 ] || worst=1
      [ ! -f "$work/$name.json" ] || files+=("$work/$name.json")
    done
  done
  [ ${#files[@]} -gt 0 ] || return 1
  python3 benchmark/goals/goals.py merge "$results/gather.json" "${files[@]}" || worst=1
  return "$worst"
}

prefill() {
  local seconds=$1 few=()
  # What is not kept for rounds is for the boot of all servers, which takes minutes with cold JIT caches.
  local measure=$((seconds / 3 < 150 ? seconds / 3 : 150))
  # All servers are up together, and one GPU does not hold two ranks of each.
  [ "$GPUS" != 1 ] || few=(--modes window kv)
  scripts/gpu/plugin.sh || return 1
  # shellcheck disable=SC2086
  bounded "$seconds" prefill.txt python3 benchmark/prefill_cost/prefill_cost.py --gpus "$gpus" \
    --ranks-per-gpu "$RANKS_PER_GPU" --limit "$((seconds - 25))" --measure "$measure" --keep "$work/logs/prefill" \
    --json "$results/prefill.json" "${few[@]}" ${PREFILL_ARGS:-}
}

failed=0
for step in "${steps[@]}"; do
  limit=${step^^}_LIMIT
  seconds=$(allowed "${!limit}")
  if [ "$seconds" -lt 60 ]; then
    echo "== $step: left out, $seconds s are too few"
    note "$step" skipped 0 0
    failed=1
    continue
  fi
  echo "== $step: $GPUS GPUs, $ranks ranks, at most $seconds s"
  started=$SECONDS
  rm -f "$results/$step.json" # one of an earlier call is not this call's result
  "$step" "$seconds"
  status=$?
  note "$step" ran "$status" $((SECONDS - started))
  echo "== $step: status $status after $((SECONDS - started)) s"
  [ "$status" = 0 ] || failed=1
done

python3 - "$work/steps.tsv" "$results/steps.json" "$GPUS" "$RANKS_PER_GPU" <<'PY' || failed=1
import json
import os
import sys
import time

table, out, gpus, ranks = sys.argv[1:]
rows = [line.rstrip("\n").split("\t") for line in open(table, encoding="utf-8")]
found = {
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
    "commit": os.environ.get("DSPARK_CP_COMMIT"),
    "gpus": int(gpus),
    "ranks_per_gpu": int(ranks),
    "steps": [
        {"step": name, "state": state, "status": int(status), "seconds": int(seconds)}
        for name, state, status, seconds in rows
    ],
}
with open(out, "w", encoding="utf-8") as file:
    json.dump(found, file, indent=1)
PY
tar -C "$work/logs" -cJf "$results/logs.tar.xz" . || failed=1
if [ "${CACHES:-0}" != 0 ]; then scripts/gpu/caches.sh "$results/K.tar.xz" || failed=1; fi
files=()
for name in smoke gather prefill; do [ ! -f "$results/$name.json" ] || files+=("$results/$name.json"); done
# What was missed is in the table; whether the steps ran is this script's own status.
[ ${#files[@]} -eq 0 ] || python3 benchmark/goals/goals.py "${files[@]}" || [ $? = 1 ] || failed=1
exit "$failed"
