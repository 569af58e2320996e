# shellcheck shell=bash disable=SC2034 # the scripts that source this file use what it sets
# For leader.sh and worker.sh: the files of SSH, written to a folder of its own in memory. Sourced by
# bash; defines:
#
#   key     the private key: the file that MOESERVE_SSH_KEY names
#   port    the port of sshd: MOESERVE_SSH_PORT or 2222
#   folder  the folder: MOESERVE_RANKS_FOLDER or /dev/shm/moeserve-ssh
#   public  the public key, as "TYPE KEY"
#
# One key serves for all: it identifies the clients and every sshd, so that no host is trusted at
# first sight.

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

key=${MOESERVE_SSH_KEY:-/etc/moeserve/ssh/ssh-privatekey}
port=${MOESERVE_SSH_PORT:-2222}
folder=${MOESERVE_RANKS_FOLDER:-/dev/shm/moeserve-ssh}
umask 077
mkdir -p "$folder" || die "$folder cannot be made: mount a writable folder at /dev/shm"
[[ -r $key ]] || die "$key is missing or cannot be read: mount the Secret with the SSH key"
public=$(ssh-keygen -y -P '' -f "$key" | cut -d ' ' -f 1,2) || die "$key is no private key of SSH"
