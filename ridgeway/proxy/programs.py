"""Compile once: the head's table of compiled programs, over the persistent cache and the compiler processes."""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ridgeway.cluster.compilers import Ask
from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.protocol import compiler_callbacks
from ridgeway.proxy.compile_cache import CompileCache
from ridgeway.proxy.executables import CompiledProgram, Executable, program_key

IDLE_PROGRAMS_KEPT = 256
PRELOADED_PROGRAMS = 8
COMPILED_KEPT = 512


class Programs:
    """Shared by all sessions of a head."""

    def __init__(self, manager: ResourceManager, cache: CompileCache, platform: str, emit: Callable[..., Any]):
        self._manager = manager
        self.cache = cache
        self._platform = platform
        self._emit = emit
        self._compiled: OrderedDict[str, CompiledProgram] = OrderedDict()
        self._running: dict[str, asyncio.Task[tuple[CompiledProgram, bool]]] = {}
        self._users: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._used_together: OrderedDict[str, Executable] = OrderedDict()
        """programs that spanned executors, the last used last"""

    async def compile(
        self, artifact: bytes, options: bytes, replicas: int, partitions: int, session: int, ask: Ask
    ) -> CompiledProgram:
        """The compiled program, from memory, disk or a compiler; the same request twice at once compiles once. One that
        asks the controller's Python while it is compiled (over ``ask``) is compiled each time, since its bytes do not
        say what that would answer.

        Raises:
          statuses.StatusError: see `cluster.compilers.CompilerPool.compile`.
        """
        platform = f"{self._platform} {await self._manager.compilers.known_environment()}"
        asks = compiler_callbacks.may_ask(artifact)
        if asks:
            platform += f" compilation {next(self._numbers)}"
        key = program_key(artifact, options, replicas, partitions, platform)
        started = time.monotonic()
        found = self._compiled.get(key)
        hit = found is not None
        if found is not None:
            self._compiled.move_to_end(key)
            self.cache.hits += 1
        else:
            task = self._running.get(key)
            if task is None:
                task = asyncio.create_task(
                    self._make(key, artifact, options, replicas, partitions, session, ask if asks else None)
                )
                self._running[key] = task
                task.add_done_callback(lambda _: self._running.pop(key, None))
            found, hit = await asyncio.shield(task)
        self._emit(
            "compiled", program=key[:16], name=found.metadata["name"], seconds=round(time.monotonic() - started, 4),
            cache="hit" if hit else "miss", session=session, devices=replicas * partitions,
        )  # fmt: skip
        return found

    async def _make(
        self, key: str, artifact: bytes, options: bytes, replicas: int, partitions: int, session: int, ask: Ask | None
    ) -> tuple[CompiledProgram, bool]:
        stored = None if ask else await asyncio.to_thread(self.cache.load, key)
        if stored is None:
            self._emit("compile_started", program=key[:16], session=session, devices=replicas * partitions)
            metadata, serialized = await self._manager.compilers.compile(artifact, options, replicas, partitions, ask)
            if ask is None:
                await asyncio.to_thread(self.cache.store, key, metadata, serialized)
        else:
            metadata, serialized = stored
        compiled = CompiledProgram(key, metadata, serialized, options, replicas, partitions, ask is not None)
        if not compiled.private:
            self._compiled[key] = compiled
        while len(self._compiled) > COMPILED_KEPT:
            self._compiled.popitem(last=False)
        return compiled, stored is not None

    def retain(self, executable: Executable) -> None:
        """A session made an executable."""
        self._users[executable.program] = self._users.get(executable.program, 0) + 1
        self._idle.pop(executable.program, None)

    def release(self, executable: Executable) -> None:
        """A session dropped one; executors keep the program a while, since recovery makes the same one again."""
        left = self._users[executable.program] - 1
        if left:
            self._users[executable.program] = left
            return
        del self._users[executable.program]
        if executable.callbacks or executable.compiled.private:
            self._unload(executable.program)  # it is like no other
            return
        self._idle[executable.program] = None
        while len(self._idle) > IDLE_PROGRAMS_KEPT:
            self._unload(self._idle.popitem(last=False)[0])

    def _unload(self, program: str) -> None:
        for link in self._manager.executors.values():
            if program in link.loaded_programs:
                link.loaded_programs.discard(program)
                link.send(["unload", [program]])

    def ensure_loaded(self, executable: Executable, executors: tuple[ExecutorLink, ...]) -> None:
        """Give the program to those executors that do not have it."""
        order: tuple[list[Any], list[bytes]] | None = None
        for link in executors:
            if executable.program not in link.loaded_programs:
                order = order or executable.load_order()
                link.send(*order)
                link.loaded_programs.add(executable.program)

    def used_together(self, executable: Executable) -> None:
        """A program that spans executors is being executed: after a loss it will be wanted again."""
        self._used_together.pop(executable.program, None)
        self._used_together[executable.program] = executable
        if len(self._used_together) > PRELOADED_PROGRAMS:
            self._used_together.popitem(last=False)

    def preload(self, members: list[ExecutorLink]) -> None:
        """Have the members of a new generation load what was last used together, the largest first, while the
        controller traces: loading a training step takes each executor some tenths of a second."""
        topology = self._manager.topology
        slots = {link.slot for link in members}
        fitting = [
            executable
            for executable in self._used_together.values()
            if all(topology.slot_of_device(device) in slots for device in executable.devices)
        ]
        fitting.sort(key=lambda executable: -len(executable.compiled.serialized))
        for link in members:
            first = topology.first_device(link.slot)
            mine = [e for e in fitting if any(first <= d < first + topology.devices_per_host for d in e.devices)]
            for executable in mine:
                self.ensure_loaded(executable, (link,))
            if mine:
                link.send(["preload", [executable.program for executable in mine]])
