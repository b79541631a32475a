"""Slices of several hosts, and hosts that are really separate: network namespaces with their own addresses."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import e2e_harness as harness
import pytest
from e2e_harness import TRAINER, Controller, Place, Running, losses, total, until

from ridgeway.launch.environment import command_environment

pytestmark = harness.MARKS


def test_one_host_of_a_slice_is_killed(tmp_path: Path) -> None:
    with harness.cluster_in(tmp_path, "2x2x1") as cluster, cluster.controller() as controller:
        before = cluster.wait_whole()
        controller.run("""
everywhere = sharded(devices_of(0, 1))
first = sharded(devices_of(0))
second = sharded(devices_of(1))
beside = sharded(devices_of(1)[:1])
result = float(mix(everywhere, 3).sum())
in_flight = mix(everywhere, 1000)
""")
        cluster.kill_worker(1, 1)
        for name in ("in_flight", "everywhere", "second"):
            text = controller.error_of(f"np.asarray({name})")
            assert text.startswith("DATA_LOSS: ") and "slice 1 host 1" in text, text
        # What lies wholly on other hosts stays, also on the other host of the slice that is down.
        kept = "result = [float(mix(first, 3).sum()), float(np.asarray(beside).sum())]"
        right = [total(2), total(1)]
        assert controller.run(kept) == right
        cluster.wait_whole()
        assert controller.run(kept) == right
        everywhere = "result = float(mix(sharded(devices_of(0, 1)), 3).sum())"
        assert controller.run(everywhere) == total(4)
        after = cluster.hosts()
        assert after[1, 1].pid != before[1, 1].pid
        for slot in ((0, 0), (0, 1), (1, 0)):
            assert cluster.went_on(before[slot], after[slot])

        # A whole slice at once, both its hosts.
        since = cluster.now()
        for host in (0, 1):
            cluster.kill_worker(0, host)
        for host in (0, 1):
            cluster.wait_event(since, "host_lost", slice=0, host=host)
        assert controller.error_of("np.asarray(first)").startswith("DATA_LOSS: ")
        cluster.wait_whole()
        assert controller.run(everywhere) == total(4)
        assert cluster.went_on(before[1, 0], cluster.host(1, 0))


# ---- separate hosts


class Network:
    """Hosts 1, 2, 3... as network namespaces on one switch; host n has the address 10.83.x.n."""

    def __init__(self, count: int):
        self._tag = f"rw{os.getpid() % 100_000}{secrets.token_hex(2)}"
        self._subnet = f"10.83.{secrets.randbelow(250) + 1}"
        self._names = [f"{self._tag}-{number}" for number in range(count + 1)]  # 0 is the switch

    def make(self) -> None:
        """Raises:
        PermissionError: this machine does not allow it; the text says what was refused.
        """
        switch = self._names[0]
        for name in self._names:
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        self._ip("-n", switch, "link", "add", "switch", "type", "bridge")
        self._ip("-n", switch, "link", "set", "switch", "up")
        for number, name in list(enumerate(self._names))[1:]:
            self._ip(
                "-n", name, "link", "add", "eth0", "type", "veth",
                "peer", "name", f"port{number}", "netns", switch,
            )  # fmt: skip
            self._ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            self._ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "eth0", "up")

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise PermissionError(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")

    def address(self, number: int) -> str:
        """A host's address."""
        return f"{self._subnet}.{number}"

    def on(self, number: int) -> list[str]:
        """What to write before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self._names[number]]

    def unplug(self, number: int) -> None:
        """Nothing reaches the host or leaves it, and nobody is told."""
        self._ip("-n", self._names[0], "link", "set", f"port{number}", "down")

    def plug_in(self, number: int) -> None:
        """Undo `unplug`."""
        self._ip("-n", self._names[0], "link", "set", f"port{number}", "up")

    def silence(self, sender: int, receiver: int) -> None:
        """Nothing that one host sends gets to the other; the other direction goes on."""
        self._ip("-n", self._names[sender], "route", "add", "blackhole", self.address(receiver))

    def let_speak(self, sender: int, receiver: int) -> None:
        """Undo `silence`."""
        self._ip("-n", self._names[sender], "route", "del", "blackhole", self.address(receiver))

    def remove(self) -> None:
        """End it; its interfaces go with it."""
        for name in self._names:
            with contextlib.suppress(PermissionError):
                self._ip("netns", "del", name)


@pytest.fixture
def network() -> Iterator[Network]:
    """A head's host (1) and two workers' (2 and 3)."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (Debian: iproute2)")
    made = Network(3)
    try:
        try:
            made.make()
        except PermissionError as error:
            pytest.skip(f"this machine allows no network namespaces: {error}")
        yield made
    finally:
        made.remove()


class SeparateHosts:
    """A cluster of two slices, each on a host of its own, the head on a third."""

    SECRET = "known to all hosts"
    SETTINGS = (
        "orphan_policy=wait", "heartbeat_timeout_seconds=3", "heartbeat_interval_seconds=0.3",
        "suspect_after_seconds=1",
    )  # fmt: skip

    def __init__(self, place: Place, network: Network):
        self._place = place
        self._network = network
        self.head = place.ridgeway(
            "head", "--topology", "2x1x2", "--cluster-host", "0.0.0.0",
            *(f"--set={setting}" for setting in self.SETTINGS),
            prefix=network.on(1), RIDGEWAY_CLUSTER_SECRET=self.SECRET,
        )  # fmt: skip
        self.head.says("waiting for 2 workers")
        self.workers = [
            place.ridgeway(
                "worker", "--head", f"{network.address(1)}:29001", "--slice", str(index), "--host", "0",
                prefix=network.on(2 + index), RIDGEWAY_CLUSTER_SECRET=self.SECRET,
            )
            for index in (0, 1)
        ]  # fmt: skip
        self._events = place.ridgeway("events", "--follow", "--json", prefix=network.on(1))
        self.environment = command_environment({}, "127.0.0.1", 29000)

    def train(self, checkpoints: Path, *arguments: str) -> Running:
        """The plain trainer, on the head's host."""
        command = [sys.executable, str(TRAINER), "--checkpoints", str(checkpoints), *arguments]
        return self._place.start(command, self._network.on(1), **self.environment)

    def controller(self) -> Controller:
        """A program that does what it is told, on the head's host."""
        return Controller(self._place, self.environment, self._network.on(1))

    @property
    def count(self) -> int:
        """How many events there have been."""
        return len(self._events.stdout)

    def wait_event(self, after: int, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event that is not among the first so many."""

        def found() -> dict[str, Any] | None:
            events = [json.loads(line) for line in self._events.stdout[after:]]
            return next((e for e in events if e["kind"] == kind and fields.items() <= e.items()), None)

        return until(found, lambda: "\n".join([f"no {kind} {fields}:", *self._events.stdout[after:]]))

    def end(self) -> None:
        """Stop the head, and with it everything."""
        self.head.process.send_signal(signal.SIGTERM)
        assert self.head.wait() == 0, self.head.describe()
        for worker in self.workers:
            assert worker.wait() == 0, worker.describe()
        assert self._events.wait() == 0


@pytest.mark.maxtext
def test_separate_hosts(place: Place, network: Network, tmp_path: Path) -> None:
    hosts = SeparateHosts(place, network)
    for index in (0, 1):
        hosts.wait_event(0, "slice_ready", slice=index)
    since = hosts.count
    run = hosts.train(tmp_path / "checkpoints", "--steps", "40", "--checkpoint-period", "10")
    run.says("^step 14 loss", "stdout")

    # A host is cut off: nobody closes a connection, it is only silent.
    network.unplug(3)
    lost = hosts.wait_event(since, "host_lost", slice=1)
    assert lost["code"] == "DEADLINE_EXCEEDED" and "no heartbeat for" in lost["cause"], lost
    hosts.wait_event(since, "error_raised", code="DEADLINE_EXCEEDED")
    # Its worker notices too, and does not go on alone.
    hosts.workers[1].says(r"the head has been silent for .* waiting 60 s for a head to come back")
    network.plug_in(3)
    joined = hosts.wait_event(since, "host_joining", slice=1)
    assert joined["incarnation"] > lost["incarnation"]
    assert run.wait() == 0, run.describe()
    assert re.search(r"restored step \d+ on 4 devices", run.output), run.describe()
    assert list(losses(run.output)) == list(range(40))

    # One-way: the head hears nothing of a worker that still hears the head.
    with contextlib.closing(hosts.controller()) as controller:
        program = "result = float(mix(sharded(devices_of(0, 1)), 3).sum())"
        assert controller.run(program) == total(4)
        since = hosts.count
        network.silence(2, 1)
        hosts.wait_event(since, "host_lost", slice=0, code="DEADLINE_EXCEEDED")
        text = controller.error_of(program)
        assert text.startswith("DEADLINE_EXCEEDED: ") and "slice 0 host 0" in text, text
        network.let_speak(2, 1)
        hosts.wait_event(since, "slice_ready", slice=0)
        assert controller.run(program) == total(4)
        # The other direction: the worker hears no head, which still hears it.
        since = hosts.count
        network.silence(1, 2)
        hosts.wait_event(since, "host_lost", slice=0)
        text = controller.error_of(program)
        assert text.startswith(("DATA_LOSS: ", "DEADLINE_EXCEEDED: ")) and "slice 0 host 0" in text, text
        network.let_speak(1, 2)
        hosts.wait_event(since, "slice_ready", slice=0)
        assert controller.run(program) == total(4)
    hosts.end()
    place.assert_nothing_left()
