"""Network namespaces that stand for machines: each has a host name and an address of its own.

Open MPI starts its daemons in them by namespace_agent.sh instead of ssh. Needs root.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess

AGENT = pathlib.Path(__file__).resolve().parent / "namespace_agent.sh"
BRIDGE = "moeserve-br"
NETWORK = "10.213.77"


def why_not():
    """Returns why namespaces cannot be made here, or an empty text."""
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    made = subprocess.run(["ip", "netns", "add", "moeserve-try"], capture_output=True, text=True,
                          check=False)
    if made.returncode != 0:
        return f"network namespaces are not allowed: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", "moeserve-try"], check=False)
    return ""


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Namespaces:
    """`count` namespaces, moeserve0, moeserve1, ..., on one bridge, which has an address, too."""

    def __init__(self, count):
        self.names = [f"moeserve{i}" for i in range(count)]
        self.close()
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for i, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", f"mv{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"mv{i}", "master", BRIDGE)
            ip("link", "set", f"mv{i}", "up")
            ip("-n", name, "address", "add", f"{NETWORK}.{10 + i}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def launcher(self, mpiexec, ranks):
        """The beginning of a command that runs `ranks` ranks, one after the other on each."""
        hosts = ",".join(f"{name}:{-(-ranks // len(self.names))}" for name in self.names)
        return [mpiexec, "--allow-run-as-root", "--oversubscribe", "--host", hosts, "--mca",
                "plm_rsh_agent", str(AGENT), "--mca", "btl", "tcp,self", "--mca",
                "btl_tcp_if_include", f"{NETWORK}.0/24", "--mca", "oob_tcp_if_include",
                f"{NETWORK}.0/24", "--mca", "plm_rsh_no_tree_spawn", "1", "--map-by", "node",
                "-n", str(ranks)]

    def set_link(self, index, up):
        """Takes the network of a namespace down or up."""
        ip("link", "set", f"mv{index}", "up" if up else "down")

    def mend(self):
        """Ends what runs in the namespaces, and takes their networks up."""
        for index in range(len(self.names)):
            for pid in self.pids():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.set_link(index, True)

    def pids(self, program=None):
        """The processes in the namespaces: of a program, or all."""
        found = []
        for name in self.names:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True,
                                    check=True).stdout
            for pid in listed.split():
                with contextlib.suppress(OSError):
                    name_of_program = pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
                    if program in (None, name_of_program):
                        found.append(int(pid))
        return found

    def address(self, index):
        return f"{NETWORK}.{10 + index}"

    def close(self):
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", BRIDGE)

