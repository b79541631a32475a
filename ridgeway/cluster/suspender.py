"""Carries out what `membership` decides about suspensions: orders to save and restore, links that change hands.

A suspended executor's link stays what arrays refer to; its process is replaced under it.  So a handle is valid before,
meanwhile and after, and what was lost (a link that is marked so) stays lost.
"""

import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, KeysView
from typing import TYPE_CHECKING, Any

from ridgeway.cluster.agent_link import AgentLink
from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.protocol.status import Status

if TYPE_CHECKING:
    from ridgeway.cluster.resource_manager import ResourceManager

LEAVE_SECONDS = 5.0
"""How long the connection of an agent that was told to stop is left open."""


class Suspender:
    """The suspensions of one cluster, as links and orders."""

    def __init__(self, manager: "ResourceManager", scratch_folder: str):
        self._manager = manager
        self._scratch_folder = scratch_folder
        self._unique = secrets.token_hex(4)
        """Another head may have used the same folder."""
        self._links: dict[int, ExecutorLink] = {}
        """slot -> the executor that is suspended"""
        self._marks: dict[int, str] = {}
        """slot -> what its saved state must be"""
        self._paths: dict[int, str] = {}
        self._requests: dict[int, int] = {}
        """slot -> how many requests the executor has answered, which a replacement goes on counting"""
        self._leaving: list[tuple[float, AgentLink]] = []
        self._waiting: dict[int, Callable[[], None]] = {}
        """by slot: what orders the state to be saved"""
        self.busy: list[Callable[[int], bool]] = []
        """Whether something goes on beside the executor in a slot that will still need it. Nothing new is begun."""
        self._when_free: deque[Callable[[], None]] = deque()
        self.on_change: list[Callable[[], None]] = []
        """Called when a suspension is over, or has failed."""

    @property
    def slots(self) -> KeysView[int]:
        """Slots that are suspended, from the announcement on: what touches them must wait."""
        return self._links.keys()

    def now(self) -> float:
        """Seconds of the cluster's clock."""
        return self._manager.clock()

    def places(self, slots: Iterable[int]) -> list[list[int]]:
        """Slices and hosts, as fields of an event."""
        return [list(self._manager.slot_names(slot).values()) for slot in slots]

    # ---- effects

    def suspend(self, number: int, slot: int, notice_seconds: float) -> None:
        """Have an executor save its state."""
        manager = self._manager
        link = manager.executors[number]
        names = manager.slot_names(slot)
        path = f"{self._scratch_folder}/slice-{names['slice']}-host-{names['host']}.{self._unique}.{number}"
        self._links[slot], self._paths[slot] = link, path
        manager.compilers.avoid_agent(link.agent)
        end = manager.clock() + notice_seconds
        self._waiting[slot] = lambda: self._order_to_save(link, slot, path, end - manager.clock())
        self._order_if_idle(slot)

    def _order_if_idle(self, slot: int) -> None:
        if not any(busy(slot) for busy in self.busy):
            self._waiting.pop(slot)()

    def _order_to_save(self, link: ExecutorLink, slot: int, path: str, notice_seconds: float) -> None:
        manager, number = self._manager, link.number
        manager.dissolve(number)

        def saved(error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
            if error is None:
                mark, size, about = fields
                self._marks[slot] = mark
                manager.apply(manager.membership.state_saved(manager.clock(), number, size, about))
            elif link.lost is None:
                manager.apply(manager.membership.save_failed(manager.clock(), number, error.message))

        # The process goes after this answer, so every earlier one must have come.
        link.request_last("suspend", [self._scratch_folder, path, slot, notice_seconds], saved)
        self._requests[slot] = link.requests
        link.suspend()

    def detach(self, number: int) -> None:
        """An executor's state is saved."""
        self._manager.executors.pop(number).detach()

    def restore(self, number: int, slot: int) -> None:
        """Have a replacement's executor read the state."""
        manager = self._manager
        link = manager.executors[number]
        link.slot = slot
        link.place = manager.topology.describe_slot(slot)
        link.send(["assign", slot, manager.topology.first_device(slot)])

        def restored(error: Status | None, fields: list[Any], buffers: list[bytes]) -> None:
            if error is None:
                manager.apply(manager.membership.state_restored(manager.clock(), number))
            elif link.lost is None:
                manager.apply(manager.membership.restore_failed(manager.clock(), number, error.message))

        fields = [self._paths[slot], slot, self._marks[slot], self._requests[slot]]
        link.request("restore", fields, restored)

    def resume(self, number: int, slot: int) -> None:
        """A replacement has the state: it is the suspended executor from now on."""
        manager = self._manager
        link = self._links.pop(slot)
        for table in (self._marks, self._paths, self._requests):
            del table[slot]
        link.adopt(manager.executors[number])
        manager.executors[number] = link
        manager.generations.add(number)

    def take_lost(self, slot: int) -> ExecutorLink | None:
        """The suspended executor of a slot, whose state is lost now; None if there is none."""
        link = self._links.pop(slot, None)
        self._waiting.pop(slot, None)
        self._marks.pop(slot, None)
        self._requests.pop(slot, None)
        path = self._paths.pop(slot, None)
        if path is not None:
            # What is left there of a state is of no use. Perhaps in vain: the folder may be on another host.
            threading.Thread(target=shutil.rmtree, args=(path, True), name="remove-state", daemon=True).start()
        return link

    def release(self, agent: AgentLink, reason: str) -> None:
        """Have an agent stop."""
        agent.send(["stop", reason])
        self._leaving.append((self._manager.clock() + LEAVE_SECONDS, agent))

    def changed(self) -> None:
        """Some suspension is over: what waits for it is looked at again."""
        for callback in self.on_change:
            callback()
        while self._when_free and not self._links:
            self._when_free.popleft()()

    def when_free(self, callback: Callable[[], None]) -> None:
        """Call back when nothing is suspended: for what makes orders long after the request that it belongs to, and may
        touch anything."""
        if self._links or self._when_free:
            self._when_free.append(callback)
        else:
            callback()

    # ---- time

    def tick(self, now: float) -> None:
        """Order what could not be ordered before; close the connections of agents that should be gone."""
        for slot in list(self._waiting):
            self._order_if_idle(slot)
        late = [agent for deadline, agent in self._leaving if now >= deadline]
        self._leaving = [entry for entry in self._leaving if now < entry[0]]
        for agent in late:
            agent.close()
