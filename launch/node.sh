#!/usr/bin/env bash
# What runs on each node: its environment, then torchrun with the words given, `-m MODULE FLAGS`. Started once on every
# node by srun (launch/slurm/pretrain.sbatch), or on one machine by launch/local.sh.
#
#   MEGAGATE_RANKS   processes on this node, one for each GPU
#   MEGAGATE_ENV     which of launch/env/ to use
#   MASTER_ADDR, MASTER_PORT   where the first node listens
#   MEGAGATE_ATTEMPT, MEGAGATE_SUPERVISE   set by the supervisor: which attempt this is, and the folder of its records
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# A rank has a connection to many others; shells come with the right to 1024 files and the right to more.
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true

node="${SLURMD_NODENAME:-$(hostname)}"
if [ -n "${MEGAGATE_SUPERVISE:-}" ]; then
    # Tracebacks and torchrun's reports: to a file of this node too.
    mkdir -p "$MEGAGATE_SUPERVISE/nodes"
    # What killed ranks of an earlier attempt left behind may still hold the GPU's memory.
    for environ in /proc/[0-9]*/environ; do
        if grep -qszFx "MEGAGATE_SUPERVISE=$MEGAGATE_SUPERVISE" "$environ" &&
            ! grep -qszFx "MEGAGATE_ATTEMPT=${MEGAGATE_ATTEMPT:-0}" "$environ"; then
            pid="${environ#/proc/}"
            kill -KILL "${pid%/environ}" 2>/dev/null || true
        fi
    done
    exec 2> >(trap '' USR1 USR2 TERM INT; exec tee -a "$MEGAGATE_SUPERVISE/nodes/$node.log" >&2)
fi

# Signals reach every process here. The ranks handle them (save and end); torchrun would kill the ranks.
trap '' USR1 USR2 TERM
# Another port for each attempt: the last one may not be free yet.
port=$((${MASTER_PORT:-29500} + ${MEGAGATE_ATTEMPT:-0} % 100))
exec "${MEGAGATE_PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${SLURM_STEP_NUM_NODES:-1}" --node-rank "${SLURM_NODEID:-0}" --nproc-per-node "${MEGAGATE_RANKS:-1}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "$port" \
    --max-restarts 0 --signals-to-handle SIGINT,SIGHUP,SIGQUIT --shutdown-timeout 15 "$@"
