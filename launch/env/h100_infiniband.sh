# shellcheck shell=bash
# H100 and H200 nodes with NVLink inside and InfiniBand between them. Sourced by launch/environment.sh on every node.

# shellcheck source=launch/env/generic.sh
source "$(dirname "${BASH_SOURCE[0]}")/generic.sh"

# Which adapters are for training: `ibstat -l` lists them. "mlx5" takes all; leave out those of storage with
# NCCL_IB_HCA=^mlx5_4,mlx5_5 or name each.
export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5}"
# 2^22 x 4 us = 17 s until a lost packet counts as an error: a flapping link does not end the run.
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"
export NCCL_IB_RETRY_CNT="${NCCL_IB_RETRY_CNT:-7}"
# Reductions inside the NVLink switch: NCCL uses them where they work. 0 turns them off, 1 fails where they do not work.
# export NCCL_NVLS_ENABLE=0
# Communication that overlaps with matrix products needs few of the streaming multiprocessors.
export NVTE_FWD_LAYERNORM_SM_MARGIN="${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}"
export NVTE_BWD_LAYERNORM_SM_MARGIN="${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}"
