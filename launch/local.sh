#!/usr/bin/env bash
# Train on this machine under the supervisor, which brings the run back after a crash:
#
#   launch/local.sh --recipe FILE --save DIR [any flag of megagate.pretrain]
#
# One rank for each GPU, or MEGAGATE_RANKS of them. Run it again to go on where it was.
#   MEGAGATE_RANKS       processes (default: the GPUs here, else 1)
#   MEGAGATE_ENV         which of launch/env/ to use (default: generic, or cpu without a GPU)
#   MEGAGATE_PYTHON      the interpreter (default: .venv/bin/python, else python)
#   MEGAGATE_SUPERVISOR  flags of the supervisor: python -m megagate.supervise run --help
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${MEGAGATE_PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then
    MEGAGATE_PYTHON="$root/.venv/bin/python"
fi
export MEGAGATE_PYTHON="${MEGAGATE_PYTHON:-python}"
gpus="$( (nvidia-smi --list-gpus 2>/dev/null || true) | grep -c '^GPU' || true)"
export MEGAGATE_RANKS="${MEGAGATE_RANKS:-$((gpus > 0 ? gpus : 1))}"
if [ "$gpus" -gt 0 ]; then
    export MEGAGATE_ENV="${MEGAGATE_ENV:-generic}"
else
    export MEGAGATE_ENV="${MEGAGATE_ENV:-cpu}"
fi
# Two runs on one machine must not meet.
export MASTER_PORT="${MASTER_PORT:-$((15000 + $$ % 16000))}"
exec "$MEGAGATE_PYTHON" -m megagate.supervise run -- \
    bash "$root/launch/node.sh" -m megagate.pretrain "$@"
