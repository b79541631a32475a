"""What commands ask of a head: status, events, signals, shutdown.  Requests and replies are in `VERBS`."""

import asyncio
import signal as signals
import time
from collections.abc import Callable
from typing import Any

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.membership import HostState
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.processes import memory_bytes
from ridgeway.transport.stream_link import LinkClosed, StreamLink

EVENTS_PER_REPLY = 1000
SUBSCRIBER_BUFFER_BYTES = 64 << 20


class ControlError(Exception):
    """A request that cannot be carried out; the text says why and what to do."""


class Control:
    """Serves control links."""

    def __init__(
        self,
        manager: ResourceManager,
        event_log: Any,
        describe_proxy: Callable[[], dict[str, Any]],
        stop: Callable[[str], None],
    ):
        self._manager = manager
        self._events = event_log
        self._describe_proxy = describe_proxy
        self._stop = stop

    async def serve(self, link: StreamLink) -> None:
        """Answer one link's requests until it closes."""
        unsubscribe: list[Callable[[], None]] = []
        try:
            while True:
                message, _ = await link.receive()
                if message[0] != "request" or len(message) != 4:
                    link.send(["error", 0, "INVALID_ARGUMENT", "expected ['request', id, verb, arguments]"])
                    continue
                _, request, verb, arguments = message
                handler = getattr(self, f"verb_{verb}", None)
                if handler is None:
                    known = ", ".join(sorted(n[5:] for n in dir(self) if n.startswith("verb_")))
                    link.send(["error", request, "INVALID_ARGUMENT", f"unknown request {verb!r}; known: {known}"])
                    continue
                try:
                    link.send(["reply", request, handler(**arguments)])
                except ControlError as error:
                    link.send(["error", request, "INVALID_ARGUMENT", str(error)])
                except (TypeError, ValueError) as error:
                    link.send(["error", request, "INVALID_ARGUMENT", f"{verb}: {error}"])
                if verb == "subscribe":
                    unsubscribe.append(self._stream_events(link, int(arguments.get("since", 0))))
                await link.drain()
        except LinkClosed:
            pass
        finally:
            for function in unsubscribe:
                function()

    def _stream_events(self, link: StreamLink, since: int) -> Callable[[], None]:
        while True:
            events, following = self._events.since(since, EVENTS_PER_REPLY)
            for event in events:
                link.send(["event", event])
            if not events or following == since:
                break
            since = following

        def forward(event: dict[str, Any]) -> None:
            if link.unsent_bytes > SUBSCRIBER_BUFFER_BYTES:
                link.close()
            link.send(["event", event])

        return self._events.subscribe(forward)

    def verb_subscribe(self, since: int = 0) -> dict[str, Any]:
        return {}

    def verb_events(self, since: int = 0, limit: int = EVENTS_PER_REPLY) -> dict[str, Any]:
        events, following = self._events.since(since, min(limit, EVENTS_PER_REPLY))
        return {"events": events, "next": following}

    def verb_status(self) -> dict[str, Any]:
        manager = self._manager
        membership, topology = manager.membership, manager.topology
        slices = []
        for index in range(topology.slices):
            hosts = [self._host(slot) for slot in topology.slots_of_slice(index)]
            suspended = any(slot in membership.suspensions for slot in topology.slots_of_slice(index))
            state = (
                "suspended" if suspended
                else "up" if membership.slice_is_up(index)
                else "joining" if membership.slice_is_joining(index)
                else "down"
            )  # fmt: skip
            slices.append({"slice": index, "state": state, "hosts": hosts})
        generations = [
            {"generation": g.number, "members": manager._places(g.members), "ready": g.ready}
            for g in manager.generations.generations.values() if not g.aborted
        ]  # fmt: skip
        standbys = [
            {"pid": manager.agents[a.number].pid, "hostname": manager.agents[a.number].hostname,
             "state": "ready" if a.executor is not None and a.executor.connected else "joining"}
            for a in membership.standbys()
        ]  # fmt: skip
        return {
            "topology": [topology.slices, topology.hosts_per_slice, topology.devices_per_host],
            "heartbeat_timeout_seconds": manager.settings.heartbeat_timeout_seconds,
            "slices": slices, "standbys": standbys, "generations": generations, "pythons": self._pythons(),
            **self._describe_proxy(),
        }  # fmt: skip

    def _host(self, slot: int) -> dict[str, Any]:
        manager = self._manager
        state = manager.membership.host_state(slot)
        number = manager.membership.slots[slot]
        agent = None if number is None else manager.agents.get(number)
        link = self._executor(slot)
        generation = None if link is None else manager.generations.generation_of(link.number)
        return {
            "slice": manager.topology.slice_of_slot(slot), "host": manager.topology.host_of_slot(slot),
            "state": state.value,
            "incarnation": number, "pid": agent.pid if agent else None, "hostname": agent.hostname if agent else None,
            "address": agent.address if agent else None,
            "executor_pid": link.pid if link and agent else None,
            "generation": generation.number if generation else None,
            "memory_bytes": link.memory_bytes if link else 0,
            "host_array_bytes": link.host_array_bytes if link else 0, "restarts": manager.membership.restarts[slot],
        }  # fmt: skip

    def _executor(self, slot: int) -> ExecutorLink | None:
        """The executor that is a host's now: of a suspended one, which keeps its place, there is no process."""
        number = self._manager.membership.slots[slot]
        executor = None if number is None else self._manager.membership.agents[number].executor
        return None if executor is None else self._manager.executors.get(executor.number)

    def _pythons(self) -> list[dict[str, Any]]:
        """Processes of colocated Python, by session and place."""
        found = [
            {**self._manager.slot_names(p.slot), "session": p.session, "pid": p.pid or None,
             "state": "ready" if p.is_open else "starting"}
            for p in self._manager.pythons
        ]  # fmt: skip
        return sorted(found, key=lambda p: (p["session"], p["slice"], p["host"]))

    def verb_signal(self, slice: int, signal: int, host: int | None = None, target: str = "worker") -> dict[str, Any]:
        manager = self._manager
        if target not in ("worker", "executor"):
            raise ControlError(f"target is {target!r}; it is 'worker' or 'executor'")
        if target == "executor" and signal == signals.SIGTERM:
            raise ControlError("an executor leaves SIGTERM to its worker; send it to that, or send SIGKILL")
        try:
            signals.Signals(signal)
        except ValueError:
            raise ControlError(f"there is no signal {signal}") from None
        pids = []
        for slot in self._slots(slice, host):
            number = manager.membership.slots[slot]
            agent = None if number is None else manager.agents.get(number)
            if agent is None or manager.membership.host_state(slot) is HostState.ABSENT:
                continue
            link = self._executor(slot)
            if target == "executor" and link is None:
                continue
            pids.append(link.pid if target == "executor" and link is not None else agent.pid)
            manager.emit(
                "signal_delivered",
                slice=manager.topology.slice_of_slot(slot), host=manager.topology.host_of_slot(slot),
                signal=signal, target=target,
            )  # fmt: skip
            agent.send(["deliver_signal", target, signal])
        if not pids:
            what = "host" if target == "worker" else "executor"
            raise ControlError(f"slice {slice} has no running {what} to signal; see `ridgeway status`")
        return {"pids": pids}

    def _slots(self, slice_index: int, host: int | None) -> list[int]:
        """The slots of a slice, or that of one of its hosts.

        Raises:
          ControlError: there is no such host.
        """
        topology = self._manager.topology
        try:
            if host is not None:
                return [topology.slot_of(slice_index, host)]
            topology.slot_of(slice_index, 0)
            return list(topology.slots_of_slice(slice_index))
        except ValueError as error:
            raise ControlError(str(error)) from None

    def verb_preempt(
        self, slice: int, host: int | None = None, notice_seconds: float | None = None, reason: str = "asked to"
    ) -> dict[str, Any]:
        manager = self._manager
        notice = manager.settings.preemption_notice_seconds if notice_seconds is None else float(notice_seconds)
        if not 0 <= notice < float("inf"):
            raise ControlError(f"a notice of {notice_seconds} s; it is a number of seconds, 0 or more")
        here = [slot for slot in self._slots(slice, host) if manager.membership.slots[slot] is not None]
        if not here:
            raise ControlError(f"slice {slice} has no running host to preempt; see `ridgeway status`")
        for slot in here:
            manager.preempt(slot, notice, reason)
        return {"hosts": [list(manager.slot_names(slot).values()) for slot in here], "notice_seconds": notice}

    def verb_expect(self, slice: int, host: int | None = None) -> dict[str, Any]:
        self._manager.expect(slice)
        self._manager.emit("replacement_expected", slice=slice, host=host)
        return {}

    def verb_give_up(self, slice: int, reason: str) -> dict[str, Any]:
        self._manager.give_up(slice, reason)
        self._manager.emit("slice_given_up", slice=slice, reason=reason)
        return {}

    def verb_report_exit(self, slice: int, host: int, description: str, launch_id: str = "") -> dict[str, Any]:
        self._manager.explain_loss(self._manager.topology.slot_of(slice, host), f"its worker was {description}")
        return {}

    def verb_shutdown(self, reason: str = "asked to") -> dict[str, Any]:
        # The head tells the agents when it stops; the reply to this request goes out first.
        asyncio.get_running_loop().call_later(0.05, self._stop, reason)
        return {}


def head_memory(pid: int) -> dict[str, Any]:
    """The head's own line in a status."""
    return {"pid": pid, "memory_bytes": memory_bytes(pid), "monotonic": time.monotonic()}
