# shellcheck shell=bash
# What a process on a node finds set: the variables of MEGAGATE_ENV, and this tree's megagate. Sourced by launch/node.sh
# and launch/process.sh.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="$root/launch/env/${MEGAGATE_ENV:-generic}.sh"
if [ ! -f "$environment" ]; then
    echo "error: there is no $environment: set MEGAGATE_ENV to one of the files in launch/env, without .sh" >&2
    exit 2
fi
# shellcheck source=/dev/null
source "$environment"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
