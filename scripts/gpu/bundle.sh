#!/usr/bin/env bash
# Build what a GPU host without network needs to run SGLang 0.5.17: archives of pinned wheels, cut to what is used.
# The host itself brings Python 3.12, torch 2.11 (CUDA 13), triton, numpy, safetensors, aiohttp and nvcc.
# usage: scripts/gpu/bundle.sh [OUT]      default OUT: .gpu (git-ignored). A few minutes and 3 GB of scratch space.
#   OUT/b/B.tar.xz   SGLang, sgl-kernel (sm_90, without FA3), FlashInfer, DeepGEMM, transformers, web stack, rich, pytest
#   OUT/a/A.tar.xz   TileLang and Z3          OUT/a/C.tar.xz   Mooncake, TCP parts
# Folder b and folder a stay below 62 MB each: they travel one after the other (step1.sh, step2.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
limit=62000000
out=${1:-.gpu}
mkdir -p "$out/a" "$out/b"
out=$(cd "$out" && pwd)
scratch=$(mktemp -d "$out/scratch.XXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch"/{wheels,large,site,moon}

target=(--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for glibc in 39 36 35 34 31 28 27 24 17 12 5; do target+=(--platform "manylinux_2_${glibc}_x86_64"); done
target+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
target+=(--platform linux_x86_64 --platform any)

# One call per wheel: no dependency is resolved, the list is complete.
while read -r pin; do
  python3 -m pip download --quiet --no-deps "${target[@]}" -d "$scratch/wheels" "$pin"
done < <(grep -v '^#' scripts/gpu/wheels-0.5.17.txt)
mv "$scratch"/wheels/sglang_kernel-*.whl "$scratch"/wheels/mooncake_transfer_engine*.whl "$scratch/large/"
python3 -m pip install --quiet --no-deps --no-compile --no-index --target "$scratch/site" "${target[@]}" "$scratch"/wheels/*.whl
python3 scripts/gpu/unzip_parts.py "$scratch/large" "$scratch/site" "$scratch/moon"

cd "$scratch/site"
rm -rf bin xgrammar/lib z3/include tilelang/3rdparty/composable_kernel tilelang/3rdparty/tvm/src
rm -rf flashinfer/data/cutlass/{examples,test,python,docs,media}
rm -rf tilelang/3rdparty/cutlass/{test,examples,python,docs,media,tools}
strip --strip-unneeded xgrammar/libxgrammar_bindings.so
(cd z3/lib && rm -f libz3.so.4.15 && mv libz3.so libz3.so.4.15 && ln -s libz3.so.4.15 libz3.so)
# SGLang imports IPython at start-up, for notebooks only.
mkdir -p IPython
echo '__version__ = "0"' >IPython/__init__.py
printf 'HTML = display = lambda *args, **kwargs: None\n' >IPython/display.py
find . -name __pycache__ -type d -prune -exec rm -rf {} +

tar -cf - tilelang tilelang-* z3 z3_solver-* | xz -9 -T2 >"$scratch/A.tar.xz"
tar -cf - --exclude=./tilelang --exclude='./tilelang-*' --exclude=./z3 --exclude='./z3_solver-*' . |
  xz -6 -T2 >"$scratch/B.tar.xz"
(cd "$scratch/moon" && tar -cf - . | xz -6 -T2 >"$scratch/C.tar.xz")
mv "$scratch/B.tar.xz" "$out/b/"
mv "$scratch/A.tar.xz" "$scratch/C.tar.xz" "$out/a/"
for folder in a b; do
  size=$(cat "$out/$folder"/*.tar.xz | wc -c)
  echo "$out/$folder: $size bytes"
  [ "$size" -lt "$limit" ] || { echo "$folder is larger than $limit bytes: too much for one step" >&2; exit 1; }
done
