#!/usr/bin/env bash
# One Python process with the environment of a node's ranks: launch/process.sh WORDS OF PYTHON. What is beside the
# training runs so, such as the measurements of tools/ablate.py.
#
#   MEGAGATE_ENV     which of launch/env/ to use
#   MEGAGATE_PYTHON  the interpreter
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "${MEGAGATE_PYTHON:-python}" "$@"
