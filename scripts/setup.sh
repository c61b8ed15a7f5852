#!/usr/bin/env bash
# Make .venv/<release>/ ready: the package, SGLang <release>, Mooncake, test tools, all from constraints/<release>.txt.
# usage: setup.sh RELEASE        Does nothing when what is there was made from the same files.
set -euo pipefail
release=${1:?usage: setup.sh RELEASE}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
constraints=constraints/$release.txt
if [ ! -f "$constraints" ]; then
  known=$(basename -s .txt constraints/*.txt | tr '\n' ' ')
  echo "SGLANG=$release: no constraints/$release.txt; releases set up here: $known" >&2
  exit 2
fi
venv=.venv/$release
stamp=$venv/.ready
wanted=$(cat "$constraints" pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
as_root() { [ "$(id -u)" = 0 ]; }
system_packages() { # install Debian / Ubuntu packages, or say how
  if as_root && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
  else
    echo "Missing system packages. Run as root: apt-get update && apt-get install -y $*" >&2
    exit 1
  fi
}
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$python is $("$python" -V 2>&1), Python 3.11 or later is needed; name another with PYTHON=..." >&2
    exit 1
  }
  if [ ! -x "$venv/bin/python" ]; then
    echo "creating $venv" >&2
    "$python" -c 'import ensurepip' 2>/dev/null ||
      system_packages "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    "$python" -m venv "$venv"
  fi
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "uv>=0.9,<1"
  echo "installing SGLang $release and Mooncake (several GB the first time)" >&2
  mooncake=$(grep '^mooncake-transfer-engine' "$constraints")
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --constraint "$constraints" \
    "sglang==$release" "$mooncake" --editable ".[test,lint]"
  echo "$wanted" >"$stamp"
fi
missing=$("$venv/bin/python" -c 'from sglang_dspark_cp.smoke.native import missing_packages; print(*missing_packages())')
# shellcheck disable=SC2086  # one word per package
[ -z "$missing" ] || system_packages $missing
command -v cc >/dev/null || command -v nvidia-smi >/dev/null || system_packages gcc libc6-dev
