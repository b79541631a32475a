"""Compiler processes and what they are compiling."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.settings import Settings
from ridgeway.transport.stream_link import StreamLink

Ask = Callable[[bytes], Awaitable[bytes]]
"""From what a compilation asks to the answer; raises `statuses.StatusError` if there is none."""


class CompilerLost(Exception):
    """The compiler process is gone with the compilation; perhaps the program was what killed it."""

    def __init__(self, blamed: bool):
        super().__init__()
        self.blamed = blamed


class Compiler:
    """The head's end of one compiler process."""

    def __init__(self, number: int, agent: int, link: StreamLink, pid: int, environment: str):
        self.number = number
        self.agent = agent
        self.link = link
        self.pid = pid
        self.environment = environment
        self.leaving = False
        """its host is preempted"""
        self.pending: dict[int, asyncio.Future[tuple[list[Any], list[bytes]]]] = {}
        self.asked: dict[int, Ask] = {}
        """who knows what these compilations ask"""


class CompilerPool:
    """Chooses a compiler, and another one when it dies; blames the program when it kills them all."""

    def __init__(self, settings: Settings, emit: Callable[..., Any]):
        self._settings = settings
        self._emit = emit
        self._compilers: dict[int, Compiler] = {}
        self._environments: set[str] = set()
        self._next_request = 0
        self._questions: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self.is_awaited: Callable[[], bool] = lambda: False
        """Whether a host whose compiler has left is expected back, however long that takes."""

    @property
    def environment(self) -> str | None:
        """What the compilers say of their hosts that changes code; None before the first compiler has joined.

        Any of them may compile, so it is all of them together where they differ, also after one has left: what was
        compiled on it may still be used.
        """
        return " | ".join(sorted(self._environments)) or None

    async def known_environment(self) -> str:
        """`environment`, once it is known.

        Raises:
          statuses.StatusError: no compiler joined in time.
        """
        if not self._environments:
            await self._choose(asyncio.get_running_loop().time() + self._settings.compile_timeout_seconds)
        return self.environment or ""

    def add(self, compiler: Compiler) -> None:
        """A compiler joined."""
        if self._environments and compiler.environment not in self._environments:
            # Nothing else tells of it before a program meets an instruction that its host does not have.
            self._emit(
                "compilers_differ", compiler=compiler.number, environment=compiler.environment,
                others=sorted(self._environments),
            )  # fmt: skip
        self._environments.add(compiler.environment)
        self._compilers[compiler.number] = compiler
        self._joined.set()

    def remove(self, number: int, blamed: bool = True) -> None:
        """A compiler is gone; what it was compiling is compiled by another. ``blamed``: that may have been why."""
        compiler = self._compilers.pop(number, None)
        if not self._compilers:
            self._joined.clear()
        if compiler is not None:
            for future in compiler.pending.values():
                if not future.done():
                    future.set_exception(CompilerLost(blamed))

    def remove_agent(self, agent: int, blamed: bool = True) -> None:
        """A host is lost, or leaves: its compiler may be silent as well, so nothing waits for it any more."""
        for compiler in [c for c in self._compilers.values() if c.agent == agent]:
            compiler.link.close()
            self.remove(compiler.number, blamed)

    def avoid_agent(self, agent: int) -> None:
        """A host is going to leave: it finishes what it compiles if it can, and gets nothing that others can do."""
        for compiler in self._compilers.values():
            if compiler.agent == agent:
                compiler.leaving = True

    def on_reply(self, compiler: Compiler, message: list[Any], buffers: list[bytes]) -> None:
        """A message of a compiler."""
        if message[0] == "heartbeat":
            return
        if message[0] == "ask":
            self._questions.add(task := asyncio.create_task(self._answer(compiler, *message[1:])))
            task.add_done_callback(self._questions.discard)
            return
        future = compiler.pending.pop(message[1], None)
        if future is None or future.done():
            return
        if message[0] == "reply":
            future.set_result((message[2:], buffers))
        else:
            future.set_exception(Status(Code(message[2]), message[3]).error())

    async def _answer(self, compiler: Compiler, request: int, number: int, question: bytes) -> None:
        ask = compiler.asked.get(request)
        try:
            if ask is None:
                raise statuses.unimplemented("nobody can say what this compilation asks").error()
            answer = ["answer", number, await ask(question)]
        except statuses.StatusError as error:
            answer = ["unanswered", number, error.status.message]
        compiler.link.send(answer)

    async def compile(
        self, artifact: bytes, options: bytes, replicas: int, partitions: int, ask: Ask | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Metadata and serialized executable; see `worker.compilation.compile_program`. ``ask`` knows what Python of
        the program's own would say (`protocol.compiler_callbacks`).

        Raises:
          statuses.StatusError: XLA refused the program, no compiler came in time, or the program crashed
            ``compile_attempts`` compilers (then it is UNIMPLEMENTED: not to be tried again).
        """
        fields, buffers = await self._run("compile", artifact, options, replicas, partitions, ask)
        return fields[0], buffers[0]

    async def program_text(self, serialized: bytes, options: bytes, replicas: int, partitions: int) -> str:
        """Optimized HLO text of a compiled program.

        Raises:
          statuses.StatusError: as `compile`.
        """
        fields, _ = await self._run("text", serialized, options, replicas, partitions)
        return fields[0]

    async def _run(
        self, kind: str, data: bytes, options: bytes, replicas: int, partitions: int, ask: Ask | None = None
    ) -> Any:
        deadline = asyncio.get_running_loop().time() + self._settings.compile_timeout_seconds
        attempt = 1
        while attempt <= self._settings.compile_attempts:
            compiler = await self._choose(deadline)
            self._next_request += 1
            request = self._next_request
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            compiler.pending[request] = future
            if ask is not None:
                compiler.asked[request] = ask
            compiler.link.send([kind, request, options, replicas, partitions], [data])
            try:
                return await asyncio.wait_for(future, max(0.0, deadline - asyncio.get_running_loop().time()))
            except CompilerLost as lost:
                self._emit("compiler_lost", compiler=compiler.number, attempt=attempt, blamed=lost.blamed)
                attempt += lost.blamed
            except TimeoutError:
                compiler.pending.pop(request, None)
                raise statuses.deadline_exceeded(
                    f"a compilation took longer than {self._settings.compile_timeout_seconds} s "
                    "(compile_timeout_seconds)"
                ).error() from None
            finally:
                compiler.asked.pop(request, None)
        raise statuses.unimplemented(
            f"this program ended {self._settings.compile_attempts} compiler processes one after the other; "
            "it makes XLA crash, please report it with the program's text"
        ).error()

    async def _choose(self, deadline: float) -> Compiler:
        while not self._compilers:
            wait = min(deadline - asyncio.get_running_loop().time(), self._settings.executor_start_timeout_seconds)
            try:
                await asyncio.wait_for(self._joined.wait(), max(0.0, wait))
            except TimeoutError:
                if self.is_awaited() and asyncio.get_running_loop().time() < deadline:
                    continue
                raise statuses.deadline_exceeded("no compiler process in the cluster").error() from None
        return min(self._compilers.values(), key=lambda c: (c.leaving, len(c.pending), c.number))
