#!/usr/bin/env bash
# Put the package of this checkout where the host's Python finds it, with the metadata that makes it an SGLang plugin.
# What is there already and the same stays as it is: servers of another run may be reading it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
target=$DSPARK_CP_HOME/plugin
info=$target/sglang_dspark_cp-0.dist-info
if [ -f "$info/entry_points.txt" ] && diff -rq -x __pycache__ python/sglang_dspark_cp "$target/sglang_dspark_cp" >/dev/null; then
  exit 0
fi
rm -rf "$target"
mkdir -p "$info"
cp -r python/sglang_dspark_cp "$target/"
printf 'Metadata-Version: 2.1\nName: sglang-dspark-cp\nVersion: 0\n' >"$info/METADATA"
printf '[sglang.srt.plugins]\ndspark_cp = sglang_dspark_cp.plugin:register\n' >"$info/entry_points.txt"
