#!/usr/bin/env bash
# Run a command with CUDA's multi-process service, so that ranks that share a GPU run side by side instead of in turns.
# usage: scripts/gpu/with-mps.sh COMMAND [ARGUMENT ...]      Exit status: that of the command.
set -uo pipefail
command -v nvidia-cuda-mps-control >/dev/null || { echo "nvidia-cuda-mps-control is not here" >&2; exit 1; }
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
nvidia-cuda-mps-control -d || exit 1
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
"$@"
