#!/usr/bin/env bash
# Pack the JIT caches of a run, so that the next host boots its servers in half the time. usage: caches.sh FILE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/gpu/env.sh
cd "$DSPARK_CP_HOME/cache"
find . -type f ! -name '*.o' ! -name build.ninja ! -name '*.lock' ! -name lock -print0 | tar --null -cf - -T - |
  python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(sys.stdin.buffer, lzma.open(sys.argv[1], "wb", preset=3))' "$1"
