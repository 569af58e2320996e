#!/bin/sh
# Stands for ssh in tests: runs the command of Open MPI in the network namespace that the host names,
# with that host name. Options before the host are not expected.
host=$1
shift
# `unshare` gives the host name a namespace; ip netns gives the network.
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@"
