"""Runs the scripts of deploy/ranks, by which pods compute one model together, with stand-ins for
mpirun, ssh and sshd that write down what they get."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy/ranks"
SECONDS = 20

MPIRUN = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" >"$NOTES/arguments"
stop() { echo "$1" >>"$NOTES/signals"; sleep 0.5; exit "${MPIRUN_STATUS:-0}"; }
trap 'stop USR1' USR1
trap 'stop TERM' TERM
touch "$NOTES/started"
[[ -n ${MPIRUN_STAYS:-} ]] || exit "${MPIRUN_STATUS:-0}"
while true; do sleep 0.05; done
"""
# Fails as often as it is told to.
SSH = """\
#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$NOTES/ssh"
if (($(wc -l <"$NOTES/ssh") <= ${SSH_FAILURES:-0})); then echo "no route" >&2; exit 255; fi
"""
SSHD = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" >"$NOTES/arguments"
[[ -n ${SSHD_STAYS:-} ]] || exit "${SSHD_STATUS:-0}"
trap 'echo TERM >>"$NOTES/signals"; exit 255' TERM
touch "$NOTES/started"
while true; do sleep 0.05; done
"""


def wait_for(path):
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.02)


class Pod:
    """A folder with stand-ins for programs, a key, and notes of what was run."""

    def __init__(self, folder):
        for program in ("bash", "ssh-keygen"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not here")
        self.notes = folder / "notes"
        self.files = folder / "files"
        programs = folder / "bin"
        self.notes.mkdir()
        programs.mkdir()
        for name, text in (("mpirun", MPIRUN), ("ssh", SSH), ("sshd", SSHD)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key], check=True)
        self.public = " ".join((folder / "key.pub").read_text().split()[:2])
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}", "NOTES": str(self.notes),
            "MOESERVE_SSH_KEY": str(self.key), "MOESERVE_RANKS_FOLDER": str(self.files),
            "MOESERVE_SSHD": str(programs / "sshd"),
            "LWS_LEADER_ADDRESS": "moe-1.moe-1.models", "LWS_GROUP_SIZE": "3"}

    def start(self, script, *arguments, before=(), **environment):
        return subprocess.Popen([*before, SCRIPTS / script, *arguments],
                                env=self.environment | environment, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def run(self, script, *arguments, **environment):
        """Returns the exit status and what was written to stderr."""
        process = self.start(script, *arguments, **environment)
        _, errors = process.communicate(timeout=SECONDS)
        return process.returncode, errors

    def note(self, name):
        path = self.notes / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path)


def test_the_leader_starts_one_rank_in_each_pod(pod):
    status, errors = pod.run("leader.sh", "serve", "--config", "a b", SET="1",
                             OMPI_MCA_btl_tcp_if_include="eth0",
                             MOESERVE_RANKS_EXPORT="OMPI_MCA_btl_tcp_if_include SET UNSET")
    assert (status, errors) == (0, "")
    arguments = pod.note("arguments")
    options = dict(zip(arguments, arguments[1:]))
    assert options["-n"] == "3"
    assert options["--map-by"] == "ppr:1:node" and options["--bind-to"] == "none"
    assert arguments[-6:] == ["-x", "SET", "/usr/local/bin/moeserve", "serve", "--config", "a b"]
    settings = {name: value for option, name, value in zip(arguments, arguments[1:], arguments[2:])
                if option == "--mca"}
    assert settings["btl_vader_single_copy_mechanism"] == "none"
    assert settings["plm_rsh_args"] == f"-F {pod.files}/config -p 2222 -i {pod.key}"
    assert pathlib.Path(options["--hostfile"]).read_text().splitlines() == [
        "moe-1.moe-1.models slots=1", "moe-1-1.moe-1.models slots=1", "moe-1-2.moe-1.models slots=1"]
    # Both workers were asked, with the options that mpirun uses.
    assert pod.note("ssh") == [f"{settings['plm_rsh_args']} moe-1-{i}.moe-1.models true"
                               for i in (1, 2)]


def test_a_file_can_name_the_hosts(pod):
    hosts = pod.notes / "hosts"
    hosts.write_text("# made by an operator\njob-worker-0.job.ns.svc slots=1\n"
                     "job-worker-1.job.ns.svc slots=1\n")
    status, errors = pod.run("leader.sh", "score", MOESERVE_HOSTFILE=str(hosts))
    assert (status, errors) == (0, "")
    arguments = pod.note("arguments")
    options = dict(zip(arguments, arguments[1:]))
    assert options["-n"] == "2"
    assert pathlib.Path(options["--hostfile"]).read_text() == hosts.read_text().partition("\n")[2]
    assert [line.split()[-2] for line in pod.note("ssh")] == [
        "job-worker-0.job.ns.svc", "job-worker-1.job.ns.svc"]
    hosts.write_text("")
    status, errors = pod.run("leader.sh", "score", MOESERVE_HOSTFILE=str(hosts))
    assert status == 1 and "names no hosts" in errors


def test_no_host_is_trusted_at_first_sight(pod):
    assert pod.run("leader.sh", "serve")[0] == 0
    assert (pod.files / "known_hosts").read_text() == f"* {pod.public}\n"
    config = (pod.files / "config").read_text().splitlines()
    assert "StrictHostKeyChecking yes" in config
    assert f"UserKnownHostsFile {pod.files}/known_hosts" in config
    assert pod.files.stat().st_mode & 0o777 == 0o700


def test_the_leader_waits_for_workers(pod):
    status, errors = pod.run("leader.sh", "serve", SSH_FAILURES="2")
    assert status == 0
    assert errors == "waiting for the worker moe-1-1.moe-1.models\n"
    assert len(pod.note("ssh")) == 4


def test_a_worker_that_does_not_appear_is_named(pod):
    status, errors = pod.run("leader.sh", "serve", SSH_FAILURES="100",
                             MOESERVE_WORKERS_TIMEOUT="0")
    assert status == 1
    assert "moe-1-1.moe-1.models was not reached: no route" in errors
    assert not pod.note("arguments")


@pytest.mark.parametrize("environment, expected", [
    ({}, "USR1"), ({"MOESERVE_STOP_SIGNAL": "TERM"}, "TERM")])
def test_sigterm_becomes_sigusr1(pod, environment, expected):
    process = pod.start("leader.sh", "serve", MPIRUN_STAYS="1", **environment)
    wait_for(pod.notes / "started")
    process.send_signal(signal.SIGTERM)
    # The script lives as long as mpirun, also if it is asked again.
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert set(pod.note("signals")) == {expected}


def test_sigterm_before_all_workers_are_there_ends_the_leader(pod):
    process = pod.start("leader.sh", "serve", SSH_FAILURES="100")
    wait_for(pod.notes / "ssh")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    assert not pod.note("arguments")


@pytest.mark.parametrize("stays", ["", "1"])
def test_the_status_is_that_of_mpirun(pod, stays):
    process = pod.start("leader.sh", "serve", MPIRUN_STATUS="75", MPIRUN_STAYS=stays)
    if stays:
        wait_for(pod.notes / "started")
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 75


@pytest.mark.parametrize("script", ["leader.sh", "worker.sh"])
def test_a_missing_key_is_named(pod, script):
    status, errors = pod.run(script, "serve", MOESERVE_SSH_KEY="/none/key")
    assert status == 1 and "/none/key is missing" in errors
    pod.key.write_text("no key\n")
    status, errors = pod.run(script, "serve")
    assert status == 1 and "is no private key" in errors


@pytest.mark.parametrize("replaced, message", [
    ({"LWS_LEADER_ADDRESS": ""}, "LWS_LEADER_ADDRESS"),
    ({"LWS_LEADER_ADDRESS": "moe"}, "unknown group"),
    ({"LWS_GROUP_SIZE": "0"}, "unknown group"),
])
def test_a_group_that_is_unknown_is_refused(pod, replaced, message):
    status, errors = pod.run("leader.sh", "serve", **replaced)
    assert status == 1 and message in errors


def test_the_worker_runs_sshd_for_this_key_only(pod):
    status, _ = pod.run("worker.sh", SSHD_STATUS="5", MOESERVE_SSH_PORT="2022")
    assert status == 5
    assert pod.note("arguments") == ["-D", "-e", "-f", f"{pod.files}/sshd_config"]
    settings = dict(line.split(" ", 1)
                    for line in (pod.files / "sshd_config").read_text().splitlines())
    assert settings["Port"] == "2022" and settings["HostKey"] == str(pod.key)
    assert settings["AuthenticationMethods"] == "publickey"
    assert settings["PasswordAuthentication"] == "no" and settings["DisableForwarding"] == "yes"
    assert (pod.files / "authorized_keys").read_text() == f"restrict {pod.public}\n"


def test_the_worker_stays_while_the_leader_drains(pod):
    # The script looks at all processes that it sees, as the first process of its container.
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"],
                                                     capture_output=True).returncode != 0:
        pytest.skip("this user cannot make a namespace of processes")
    daemon = pod.notes.parent / "orted"
    shutil.copy(shutil.which("sleep"), daemon)
    sshd = pathlib.Path(pod.environment["MOESERVE_SSHD"])
    sshd.write_text(SSHD.replace("trap", f"setsid {daemon} 2 &\ntrap", 1))
    process = pod.start("worker.sh", before=alone, SSHD_STAYS="1")
    try:
        wait_for(pod.notes / "started")
        script, = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True,
                                 check=True).stdout.split()
        os.kill(int(script), signal.SIGTERM)
        time.sleep(0.5)
        assert pod.note("signals") == ["TERM"] and process.poll() is None
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0
    finally:
        process.kill()


def test_the_scripts_pass_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here")
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS.glob("*.sh")], capture_output=True,
                          text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
