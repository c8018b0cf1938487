# shellcheck shell=bash
# Machines without a GPU: gloo over the ordinary network. Sourced by launch/environment.sh on every node.

# Threads of a rank. More than the cores it has slows every rank down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# The interface that gloo binds to; unset, it takes the one that the node's own name resolves to. Set it where that is
# the wrong network: `ip -brief address` lists them.
# export GLOO_SOCKET_IFNAME=eth0
