# shellcheck shell=bash
# GPUs, any network. Sourced by launch/environment.sh on every node; what is set already stays as it is.

# Kernels of one stream start in order, which Megatron needs for tensor parallelism on GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

# Only real problems are printed; INFO shows which network and which rings are used.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# A rank whose peer is gone ends with an error instead of waiting for ever.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
# The flight recorder: the last collectives of each rank, in memory, written to a file when one times out. The
# supervisor says where (TORCH_NCCL_DEBUG_INFO_TEMP_FILE).
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
# Memory of expert layers varies from step to step; segments that grow fragment less.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# The interface for the first connection, where the node's own name resolves to another network.
# export NCCL_SOCKET_IFNAME=eth0
# export GLOO_SOCKET_IFNAME=eth0
