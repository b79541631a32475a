"""Real network namespaces, cut and joined again; skipped where this machine does not allow them."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ridgeway.chaos import network
from ridgeway.chaos.network import Namespace, NetworkError, Place

#: Listens on its address, and says when it does.
LISTENER = """
import socket, sys
server = socket.create_server((sys.argv[1], 4242))
print("listening", flush=True)
while True:
    server.accept()[0].close()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4242), 0.5)"


class Hosts:
    """Two namespaces with an interface each, and a process that listens in each."""

    def __init__(self) -> None:
        tag = f"rwc{secrets.token_hex(3)}"
        self._names = [f"{tag}-{number}" for number in (0, 1)]
        self._processes: list[subprocess.Popen[str]] = []
        self.places: list[Place] = []
        self.namespaces: list[Namespace] = []

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            pytest.skip(f"this machine allows no network namespaces: {done.stderr.strip()}")

    def make(self) -> None:
        for name in self._names:
            self._ip("netns", "add", name)
        first, second = self._names
        self._ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, name in enumerate(self._names):
            address = f"10.84.0.{number + 1}"
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "eth0", "up")
            command = ["ip", "netns", "exec", name, sys.executable, "-c", LISTENER, address]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            assert process.stdout is not None and process.stdout.readline() == "listening\n"
            self.places.append(Place(process.pid, address))
            self.namespaces.append(Namespace(self.places[-1]))
        self._ip("-n", first, "route", "add", "default", "via", "10.84.0.2")

    def reaches(self, sender: int, receiver: int) -> bool:
        command = ["nsenter", "--target", str(self.places[sender].pid), "--net", sys.executable, "-c", CONNECT]
        done = subprocess.run([*command, self.places[receiver].address], capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def routes(self) -> str:
        return self.namespaces[0].ip("route", "show")

    def lose(self, number: int) -> None:
        """End the process that a host is known by."""
        self._processes[number].kill()
        self._processes[number].wait()

    def remove(self) -> None:
        for namespace in self.namespaces:
            namespace.undo([])
        for process in self._processes:
            process.kill()
            process.communicate()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60, check=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("there is no `ip` or no `nsenter` command (Debian: iproute2, util-linux)")
    made = Hosts()
    try:
        made.make()
        yield made
    finally:
        made.remove()


def test_a_host_is_cut_off_and_comes_back_as_it_was(hosts: Hosts) -> None:
    first, second = hosts.places
    assert network.has_own_network(first.pid, second.pid)
    assert network.has_own_network(first.pid, os.getpid())
    assert not network.has_own_network(os.getpid(), os.getppid())
    assert hosts.reaches(0, 1) and hosts.reaches(1, 0)
    before = hosts.routes()
    undo = network.cut(first)
    assert not hosts.reaches(0, 1) and not hosts.reaches(1, 0)
    undo()
    assert hosts.reaches(0, 1) and hosts.reaches(1, 0)
    assert hosts.routes() == before


def test_one_direction_is_silenced(hosts: Hosts) -> None:
    first, second = hosts.places
    undo = network.silence(first, [second])
    # Neither can connect: an answer is sent too. But nothing was done on the other side.
    assert not hosts.reaches(0, 1)
    assert "blackhole" in hosts.routes()
    assert "blackhole" not in hosts.namespaces[1].ip("route", "show")
    undo()
    assert hosts.reaches(0, 1) and "blackhole" not in hosts.routes()


def test_it_is_undone_also_when_the_worker_has_died_of_it(hosts: Hosts) -> None:
    first, second = hosts.places
    before = hosts.routes()
    silenced, cut = network.silence(first, [second]), network.cut(first)
    hosts.lose(0)
    silenced()  # which the end of the cut must not bring back
    cut()
    assert hosts.routes() == before


def test_what_cannot_be_done_changes_nothing(hosts: Hosts) -> None:
    first, second = hosts.places
    with pytest.raises(NetworkError, match="route add blackhole nonsense"):
        network.silence(first, [second, Place(second.pid, "nonsense")])
    assert hosts.reaches(0, 1)
    with pytest.raises(NetworkError):
        network.cut(Place(2**22 - 1, "10.84.0.1"))
