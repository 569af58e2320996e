#!/usr/bin/env bash
# Runs sshd as the first process of a worker's pod, without root; the leader starts the worker's rank
# by it. ssh.sh says what it reads from the environment.
#
# All pods of a group may get SIGTERM together, and the leader then drains for a while. So after SIGTERM,
# the script takes no new connections, and ends when no daemon of mpirun is left.
set -euo pipefail

sshd_pid=
stopping=false

stop() {
  [[ -n $sshd_pid ]] || exit 143
  stopping=true
  kill -TERM "$sshd_pid" 2>/dev/null || true
}
trap stop TERM

# shellcheck source=deploy/ranks/ssh.sh
. "$(dirname "${BASH_SOURCE[0]}")/ssh.sh"

printf 'restrict %s\n' "$public" >"$folder/authorized_keys"
# StrictModes would refuse files of a Secret, which belong to root.
cat >"$folder/sshd_config" <<CONFIG
Port $port
HostKey $key
AuthorizedKeysFile $folder/authorized_keys
PidFile none
StrictModes no
UsePAM no
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
DisableForwarding yes
PermitTTY no
PermitUserRC no
PrintMotd no
ClientAliveInterval 5
CONFIG

# Returns whether a rank's daemon runs: orted of Open MPI 4, prted of Open MPI 5.
has_rank() {
  local file name
  for file in /proc/[0-9]*/comm; do
    read -r name 2>/dev/null <"$file" || continue
    case $name in orted | prted) return 0 ;; esac
  done
  return 1
}

# sshd wants its absolute path, by which it starts itself again for each connection.
"${MOESERVE_SSHD:-/usr/sbin/sshd}" -D -e -f "$folder/sshd_config" &
sshd_pid=$!
status=0
wait "$sshd_pid" || status=$?
$stopping || exit "$status"
while has_rank; do sleep 0.2; done
