#!/usr/bin/env bash
# Run `sglang-dspark-cp smoke --device cuda` with the plugin as it lies in this checkout. After step1.sh and step2.sh.
# usage: scripts/gpu/run-smoke.sh NAME [OPTION ...]
#   Results lie in $DSPARK_CP_HOME/runs/NAME (report.json, a log per server, dumps). With OUT set, the report and the
#   logs are copied there as NAME.json and NAME-logs.tar.xz, and with CACHES=1 the JIT caches as K.tar.xz.
#   DSPARK_CP_COMMIT is what the report names as commit; LIMIT is the number of seconds after which the run is
#   interrupted and reports what it has (default 570). Exit status: that of the command.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
repository=$PWD
. scripts/gpu/env.sh
scripts/gpu/plugin.sh || exit 1
name=${1:?usage: scripts/gpu/run-smoke.sh NAME [OPTION ...]}
shift
cd "$DSPARK_CP_HOME" && mkdir -p runs || exit 1
timeout --foreground --signal=INT --kill-after=30 "${LIMIT:-570}" \
  python3 -m sglang_dspark_cp.cli.main smoke --device cuda --json --keep "runs/$name" "$@" >"runs/$name.json"
status=$?
if [ -n "${OUT:-}" ] && [ -d "runs/$name" ]; then
  mkdir -p "$OUT"
  [ ! -f "runs/$name/report.json" ] || cp "runs/$name/report.json" "$OUT/$name.json"
  (cd "runs/$name" && find . -maxdepth 1 -name '*.log' -print0 | tar --null -cJf "$OUT/$name-logs.tar.xz" -T -)
  [ "${CACHES:-0}" = 0 ] || "$repository/scripts/gpu/caches.sh" "$OUT/K.tar.xz"
fi
exit "$status"
