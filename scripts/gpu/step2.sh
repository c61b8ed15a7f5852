#!/usr/bin/env bash
# Second step: TileLang and Mooncake, JIT caches of an earlier run if they came along, and the plugin as it lies here.
# usage: scripts/gpu/step2.sh [OUT]      Needs OUT/a of bundle.sh; OUT/a/K.tar.xz is the optional cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
[ -d "$DSPARK_CP_HOME/site/sglang" ] || { echo "run scripts/gpu/step1.sh first" >&2; exit 1; }
unpack() {
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")' "$1" "$2"
}
for archive in A C; do unpack "${1:-.gpu}/a/$archive.tar.xz" "$DSPARK_CP_HOME/site" & done
[ ! -f "${1:-.gpu}/a/K.tar.xz" ] || unpack "${1:-.gpu}/a/K.tar.xz" "$DSPARK_CP_HOME/cache"
wait
scripts/gpu/plugin.sh
