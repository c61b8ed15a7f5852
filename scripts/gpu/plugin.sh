#!/usr/bin/env bash
# Put the package of this checkout where the host's Python finds it, with the metadata that makes it an SGLang plugin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
target=$DSPARK_CP_HOME/plugin
rm -rf "$target"
mkdir -p "$target/sglang_dspark_cp-0.dist-info"
cp -r python/sglang_dspark_cp "$target/"
printf 'Metadata-Version: 2.1\nName: sglang-dspark-cp\nVersion: 0\n' >"$target/sglang_dspark_cp-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\ndspark_cp = sglang_dspark_cp.plugin:register\n' \
  >"$target/sglang_dspark_cp-0.dist-info/entry_points.txt"
