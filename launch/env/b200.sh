# shellcheck shell=bash
# B200 and GB200 nodes. Sourced by launch/environment.sh on every node.

# From Blackwell on kernels of one stream need not start in order, and more connections let communication overlap more.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"

# shellcheck source=launch/env/h100_infiniband.sh
source "$(dirname "${BASH_SOURCE[0]}")/h100_infiniband.sh"
