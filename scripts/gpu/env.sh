# Source on the GPU host. Everything lies below $DSPARK_CP_HOME (default: the home folder).
export DSPARK_CP_HOME=${DSPARK_CP_HOME:-$HOME/dspark-cp}
export PYTHONPATH=$DSPARK_CP_HOME/plugin:$DSPARK_CP_HOME/site PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HOME=$DSPARK_CP_HOME/hf
cache=$DSPARK_CP_HOME/cache
export TVM_FFI_CACHE_DIR=$cache/tvm-ffi TILELANG_CACHE_DIR=$cache/tilelang TRITON_CACHE_DIR=$cache/triton
export SGLANG_DG_CACHE_DIR=$cache/deep_gemm TORCHINDUCTOR_CACHE_DIR=$cache/inductor FLASHINFER_WORKSPACE_BASE=$cache/flashinfer
export SGLANG_JIT_DEEPGEMM_PRECOMPILE=0
export SGLANG_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
  CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
  export CUDA_HOME
fi
# Multicast over NVLink stays off unless the host has it on: it can disturb others on a shared host.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}
export TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
