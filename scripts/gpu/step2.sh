#!/usr/bin/env bash
# Second step: TileLang and Mooncake, JIT caches of an earlier run if they came along, and the plugin as it lies here.
# usage: scripts/gpu/step2.sh [OUT]      Needs OUT/a of bundle.sh; OUT/a/K.tar.xz (caches.sh) is optional. About 10 s.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
[ -d "$DSPARK_CP_HOME/site/sglang" ] || { echo "run scripts/gpu/step1.sh first" >&2; exit 1; }
from=${1:-.gpu}/a
for archive in A C; do python3 -m tarfile -e "$from/$archive.tar.xz" "$DSPARK_CP_HOME/site"; done
[ ! -f "$from/K.tar.xz" ] || python3 -m tarfile -e "$from/K.tar.xz" "$DSPARK_CP_HOME/cache"
scripts/gpu/plugin.sh
python3 - <<'PY'
import importlib.metadata as metadata

plugins = [each.value for each in metadata.entry_points(group="sglang.srt.plugins")]
print("step 2 done: sglang", metadata.version("sglang"), "plugins", plugins)
PY
