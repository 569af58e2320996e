"""Network namespaces that stand for machines: each has a host name and an address of its own.

Open MPI starts its daemons in them by namespace_agent.sh instead of ssh. Needs root.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
AGENT = FOLDER / "namespace_agent.sh"
RELAY = FOLDER / "relay.py"
BRIDGE = "moeserve-br"
NETWORK = "10.213.77"
# Clients reach the first namespace by a network of their own, which is never limited or cut.
CLIENTS = "10.213.78"


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


def has_netem():
    """Whether the kernel can delay packets."""
    ip("link", "add", "moeserve-try", "type", "veth", "peer", "name", "moeserve-tried")
    made = subprocess.run(["tc", "qdisc", "add", "dev", "moeserve-try", "root", "netem", "delay",
                           "1ms"], capture_output=True, check=False)
    ip("link", "delete", "moeserve-try")
    return made.returncode == 0


class Namespaces:
    """`count` namespaces, moeserve0, moeserve1, ..., on one network, of which this one is a part.

    `relay_seconds`: the network is a relay that delays every frame by so much, not a bridge.
    """

    def __init__(self, count, relay_seconds=None):
        self.names = [f"moeserve{i}" for i in range(count)]
        self.relay = None
        self.close()
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        if relay_seconds is None:
            self.connect_by_bridge()
        else:
            self.connect_by_relay(relay_seconds)
        ip("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for i, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"{NETWORK}.{10 + i}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        ip("link", "add", "mvclient", "type", "veth", "peer", "name", "eth1", "netns",
           self.names[0])
        ip("address", "add", f"{CLIENTS}.1/24", "dev", "mvclient")
        ip("link", "set", "mvclient", "up")
        ip("-n", self.names[0], "address", "add", f"{CLIENTS}.10/24", "dev", "eth1")
        ip("-n", self.names[0], "link", "set", "eth1", "up")

    def connect_by_bridge(self):
        ip("link", "add", BRIDGE, "type", "bridge")
        for i, name in enumerate(self.names):
            ip("link", "add", f"mv{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"mv{i}", "master", BRIDGE)
            ip("link", "set", f"mv{i}", "up")

    def connect_by_relay(self, seconds):
        devices = [BRIDGE, *(f"mv{i}" for i in range(len(self.names)))]
        # pylint: disable-next=consider-using-with
        self.relay = subprocess.Popen([sys.executable, RELAY, str(seconds), *devices],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.relay.stdout.readline() != b"ready\n":
            raise RuntimeError("the relay did not start")
        for i, name in enumerate(self.names):
            ip("link", "set", f"mv{i}", "netns", name, "name", "eth0")

    def queue(self, *words):
        """Sets the queueing discipline of all devices of the namespaces and of their peers."""
        for i, name in enumerate(self.names):
            for where in (("-n", name, "qdisc", "replace", "dev", "eth0"),
                          ("qdisc", "replace", "dev", f"mv{i}")):
                subprocess.run(["tc", *where, "root", *map(str, words)], check=True,
                               capture_output=True)

    def lose(self, percent):
        """Drops so many of the packets that arrive in the namespaces, at random. Returns why that
        is not possible, or an empty text."""
        if shutil.which("nft") is None:
            return "nft (nftables) is not installed"
        rules = ("table inet loss {\nchain input {\ntype filter hook input priority 0\n"
                 f"iifname eth0 numgen random mod 1000 < {int(percent * 10)} counter drop\n"
                 "}\n}\n")
        for name in self.names:
            made = subprocess.run(["ip", "netns", "exec", name, "nft", "-f", "-"], input=rules,
                                  text=True, capture_output=True, check=False)
            if made.returncode != 0:
                return f"nft: {made.stderr.strip()}"
        return ""

    def lost(self):
        """The packets that lose() has dropped."""
        return sum(int(subprocess.run(["ip", "netns", "exec", name, "nft", "list", "table", "inet",
                                       "loss"], capture_output=True, text=True, check=True)
                       .stdout.split("packets ")[1].split()[0]) for name in self.names)

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

    def close(self):
        if self.relay is not None:
            self.relay.stdin.close()
            self.relay.wait(10)
            self.relay.stdout.close()
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", BRIDGE)
