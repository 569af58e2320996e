#!/usr/bin/env bash
# Starts one rank in each pod of a group, from the pod of rank 0, as its first process. Waits until all
# workers can be reached, starts mpirun, and ends with its status.
#
#   leader.sh ARGUMENT...       the arguments of moeserve, with --ranks mpi or a file that has it
#
# From the environment, beside what ssh.sh reads:
#
#   LWS_LEADER_ADDRESS, LWS_GROUP_SIZE   set by LeaderWorkerSet; worker I of the leader NAME.DOMAIN is
#                                        NAME-I.DOMAIN
#   MOESERVE_HOSTFILE                    instead of these: a file with a host in each line, where all
#                                        ranks run; this pod has none then
#   MOESERVE_WORKERS_TIMEOUT             seconds that workers have to appear (1800)
#   MOESERVE_RANKS_EXPORT                further variables that ranks in workers get, by name; those
#                                        with names that begin with OMPI_MCA_ are passed by mpirun
#   MOESERVE_STOP_SIGNAL                 what mpirun gets for SIGTERM (USR1); TERM for commands that
#                                        need no drain
#
# SIGTERM asks for a drain. mpirun would kill the ranks two seconds after a SIGTERM, so it gets SIGUSR1
# instead, which it passes on to the ranks.
set -euo pipefail

mpirun_pid=
interrupted=false

drain() {
  [[ -n $mpirun_pid ]] || exit 143
  interrupted=true
  kill -"${MOESERVE_STOP_SIGNAL:-USR1}" "$mpirun_pid" 2>/dev/null || true
}
# Without a handler, the first process of a container ignores SIGTERM.
trap drain TERM

# shellcheck source=deploy/ranks/ssh.sh
. "$(dirname "${BASH_SOURCE[0]}")/ssh.sh"
(($# > 0)) || die "expected the arguments of moeserve"

# Sets `hosts`, one for each rank, and `workers`, those of them that are other pods.
read_group() {
  local i address size rest
  if [[ -n ${MOESERVE_HOSTFILE:-} ]]; then
    while read -r address rest; do
      if [[ -n $address && $address != \#* ]]; then workers+=("$address"); fi
    done <"$MOESERVE_HOSTFILE"
    hosts=("${workers[@]}")
    ((${#hosts[@]} > 0)) || die "$MOESERVE_HOSTFILE names no hosts"
    return
  fi
  address=${LWS_LEADER_ADDRESS:?is set by LeaderWorkerSet}
  size=${LWS_GROUP_SIZE:?is set by LeaderWorkerSet}
  [[ $address == *.* && $size =~ ^[1-9][0-9]*$ ]] || die "unknown group: $address, $size pods"
  for ((i = 1; i < size; ++i)); do workers+=("${address%%.*}-$i.${address#*.}"); done
  hosts=("$address" "${workers[@]}")
}
hosts=()
workers=()
read_group

printf '%s slots=1\n' "${hosts[@]}" >"$folder/hosts"
printf '* %s\n' "$public" >"$folder/known_hosts"
cat >"$folder/config" <<CONFIG
BatchMode yes
ConnectTimeout 5
IdentitiesOnly yes
LogLevel ERROR
ServerAliveInterval 5
StrictHostKeyChecking yes
UserKnownHostsFile $folder/known_hosts
GlobalKnownHostsFile /dev/null
CONFIG

# wait_for HOST: returns when a command can be run there.
wait_for() {
  local said=false
  until ssh -F "$folder/config" -p "$port" -i "$key" "$1" true 2>"$folder/reason"; do
    if ((SECONDS >= ${MOESERVE_WORKERS_TIMEOUT:-1800})); then
      die "the worker $1 was not reached: $(tail -n 1 "$folder/reason")"
    fi
    $said || printf 'waiting for the worker %s\n' "$1" >&2
    said=true
    sleep 1
  done
}
for worker in "${workers[@]}"; do wait_for "$worker"; done

exports=()
for name in ${MOESERVE_RANKS_EXPORT:-}; do
  # mpirun refuses variables that are not set, and passes its own by itself.
  if [[ -n ${!name+set} && $name != OMPI_MCA_* ]]; then exports+=(-x "$name"); fi
done
# One rank for each host, which may use all its cores. Names are those of the cluster's DNS, with their
# domains. Containers often forbid that a process reads the memory of another one.
mpirun -n "${#hosts[@]}" --hostfile "$folder/hosts" --map-by ppr:1:node --bind-to none \
  --mca btl_vader_single_copy_mechanism none \
  --mca orte_keep_fqdn_hostnames true \
  --mca orte_tmpdir_base "$folder" \
  --mca plm_rsh_agent ssh \
  --mca plm_rsh_no_tree_spawn true \
  --mca plm_rsh_args "-F $folder/config -p $port -i $key" \
  "${exports[@]}" "${MOESERVE_PROGRAM:-/usr/local/bin/moeserve}" "$@" &
mpirun_pid=$!

# A signal ends `wait` early.
while true; do
  interrupted=false
  status=0
  wait "$mpirun_pid" || status=$?
  $interrupted || exit "$status"
done
