"""Hosts of one machine, made of Linux namespaces: each has a network, a name, IPC, /tmp and /dev/shm of its own.

Nothing of one can be reached from another one but over TCP, through bridges in a network namespace that belongs to none of
them. They share the kernel and its boot id, the clock and the files outside of /tmp and /dev/shm, and this clone, as containers of one machine do.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

# Longer names of interfaces are refused.
_MOST_LETTERS = 9
_OWN = ("--net", "--uts", "--ipc", "--mount")
_ENTERED = os.CLONE_NEWNET | os.CLONE_NEWUTS | os.CLONE_NEWIPC | os.CLONE_NEWNS


def refused() -> str:
    """Why this machine makes no such hosts; empty if it does."""
    if os.geteuid():
        return "namespaces with networks need root"
    try:
        with cluster() as made:
            made.host("probe", {"eth0": "10.77.0.9/24"})
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this machine makes no namespaces with networks: {_words(error)}"
    return ""


@dataclass(frozen=True)
class Host:
    """A host that runs.

    Attributes:
        name: of the test's.
        address: of its first interface.
        anchor: a process that keeps its namespaces.
    """

    name: str
    address: str
    anchor: int

    def command(self, *argv: str) -> list[str]:
        """A command that runs ``argv`` there."""
        return ["nsenter", "--target", str(self.anchor), *_OWN, f"--wd={os.getcwd()}", *argv]

    def run(self, *argv: str) -> str:
        """Run a command there and return what it printed."""
        return _run(self.command(*argv))

    def enter(self) -> None:
        """Move this thread there, and with it all that it starts from now on. Before anything else, as its sockets stay outside."""
        folder, pidfd = os.getcwd(), os.pidfd_open(self.anchor)
        try:
            os.unshare(os.CLONE_FS)
            os.setns(pidfd, _ENTERED)
        finally:
            os.close(pidfd)
        os.chdir(folder)


@dataclass
class Cluster:
    """Hosts, and the bridges between them; made by :func:`cluster`."""

    wire: int
    _stack: ExitStack
    _bridges: set[str] = field(default_factory=set)

    def host(
        self,
        name: str,
        interfaces: Mapping[str, str],
        *,
        network: Mapping[str, str] | None = None,
        known: Mapping[str, Sequence[str]] | None = None,
        hostname: str | None = None,
    ) -> Host:
        """Start a host.

        Args:
            name: of up to 9 letters.
            interfaces: address with prefix length by name of the interface.
            network: by name of the interface, the bridge that it is plugged into, ``lan`` unless said.
            hostname: what its kernel says, if that is not ``name``.
            known: /etc/hosts, names by address, beside localhost. None leaves its own name out, so that nothing resolves it.
        """
        assert len(name) <= _MOST_LETTERS, name
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {' '.join(names)}" for address, names in (known or {}).items()]
        setup = (
            "set -e; mount -t tmpfs none /dev/shm; mount -t tmpfs none /run; cat > /run/hosts; mount --bind /run/hosts /etc/hosts; "
            # This clone may lie in /tmp, and ranks start in it.
            'mkdir /run/here; mount --bind "$PWD" /run/here; mount -t tmpfs none /tmp; mkdir -p "$PWD"; mount --bind /run/here "$PWD"; '
            "chmod 1777 /tmp /dev/shm; hostname $0; ip link set lo up; echo ready; exec sleep infinity"
        )
        argv = ["unshare", *_OWN, "sh", "-c", setup, hostname or name]
        anchor = self._stack.enter_context(_anchor(argv, "\n".join(lines) + "\n"))
        made = Host(name, next(iter(interfaces.values())).partition("/")[0], anchor.pid)
        self._stack.callback(self.kill, made)
        for interface, address in interfaces.items():
            self._plug(made, interface, address, (network or {}).get(interface, "lan"))
        return made

    def pull(self, host: Host, interface: str = "eth0") -> None:
        """Unplug an interface: it loses its carrier."""
        self._in_wire("ip", "link", "set", "dev", _port(host, interface), "down")

    def plug_again(self, host: Host, interface: str = "eth0") -> None:
        """After :meth:`pull`."""
        self._in_wire("ip", "link", "set", "dev", _port(host, interface), "up")

    def kill(self, host: Host) -> None:
        """End all processes there but the one that keeps its namespaces."""
        network = os.stat(f"/proc/{host.anchor}/ns/net")
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):  # it has ended, or is the kernel's
                if pid != host.anchor and os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), network):
                    os.kill(pid, signal.SIGKILL)

    def _plug(self, host: Host, interface: str, address: str, bridge: str) -> None:
        if bridge not in self._bridges:
            self._bridges.add(bridge)
            self._in_wire("ip", "link", "add", "name", bridge, "type", "bridge")
            self._in_wire("ip", "link", "set", "dev", bridge, "up")
        port = _port(host, interface)
        self._in_wire(*f"ip link add name {port} type veth peer name {interface} netns {host.anchor}".split())
        self._in_wire(*f"ip link set dev {port} master {bridge} up".split())
        # Without duplicate address detection, which takes seconds.
        nodad = ["nodad"] if ":" in address else []
        host.run("ip", "address", "add", address, "dev", interface, *nodad)
        host.run("ip", "link", "set", "dev", interface, "up")

    def _in_wire(self, *argv: str) -> None:
        _run(["nsenter", "--target", str(self.wire), "--net", *argv])


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A network without hosts yet. At the end of the block all hosts end, with all that runs there."""
    with ExitStack() as stack:
        argv = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"]
        yield Cluster(stack.enter_context(_anchor(argv, "")).pid, stack)


@contextmanager
def _anchor(argv: list[str], told: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdin.write(told)
        process.stdin.close()
        if process.stdout.readline() != "ready\n":
            process.wait()
            raise subprocess.CalledProcessError(process.returncode, argv, stderr=process.stderr.read())
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _port(host: Host, interface: str) -> str:
    return f"{host.name}.{interface}"


def _run(argv: list[str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _words(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    return f"{error}: {stderr.strip()}" if stderr else str(error)
