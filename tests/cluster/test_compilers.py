"""The pool of compilers, under virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import virtual_time

from ridgeway.cluster.compilers import Compiler, CompilerPool
from ridgeway.protocol.status import Code, Status, StatusError
from ridgeway.settings import Settings

SETTINGS = Settings(compile_timeout_seconds=100.0, compile_attempts=3, executor_start_timeout_seconds=10.0)


class CompilerLink:
    """Hands every order to a function."""

    def __init__(self, obey: Callable[[list[Any]], None]):
        self._obey = obey
        self.closed = False

    def send(self, message: Sequence[Any], buffers: Sequence[Any] = ()) -> None:
        self._obey(list(message))

    def close(self) -> None:
        self.closed = True


class Pool:
    """A pool whose compilers do as a test says."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pool = CompilerPool(SETTINGS, lambda kind, **fields: self.events.append(kind))
        self.ran: list[int] = []
        self.request = 0
        self.answers: list[list[Any]] = []

    def add(self, number: int, behaviour: str, agent: int = 1, environment: str = "flags") -> Compiler:
        def obey(message: list[Any]) -> None:
            self.ran.append(number)
            request = message[1]
            loop = asyncio.get_running_loop()
            if behaviour == "compiles":
                loop.call_later(1.0, self.pool.on_reply, compiler, ["reply", request, {"name": "f"}], [b"code"])
            elif behaviour == "asks":
                if message[0] == "compile":
                    loop.call_later(1.0, self.pool.on_reply, compiler, ["ask", request, 7, b"question"], [])
                    self.request = request
                else:
                    self.answers.append(message)
                    loop.call_later(1.0, self.pool.on_reply, compiler, ["reply", self.request, {}], [b"code"])
            elif behaviour == "dies":
                loop.call_later(1.0, self.pool.remove, number)
            elif behaviour == "refuses":
                error = ["error", request, int(Code.INVALID_ARGUMENT), "no function main"]
                loop.call_later(1.0, self.pool.on_reply, compiler, error, [])

        compiler = Compiler(number, agent, CompilerLink(obey), 1, environment)  # type: ignore[arg-type]
        self.pool.add(compiler)
        return compiler

    async def compile(self) -> tuple[dict[str, Any], bytes]:
        return await self.pool.compile(b"program", b"options", 1, 2)


def test_a_program_is_compiled() -> None:
    async def test() -> None:
        pool = Pool()
        pool.add(1, "compiles")
        assert await pool.compile() == ({"name": "f"}, b"code")

    virtual_time.run(test())


def test_what_the_compiler_says_of_the_program_is_not_tried_again() -> None:
    async def test() -> None:
        pool = Pool()
        pool.add(1, "refuses")
        pool.add(2, "compiles")
        with pytest.raises(StatusError, match="no function main") as error:
            await pool.compile()
        assert error.value.status.code is Code.INVALID_ARGUMENT
        assert pool.ran == [1]

    virtual_time.run(test())


def test_a_program_whose_compiler_died_is_compiled_by_another() -> None:
    async def test() -> None:
        pool = Pool()
        pool.add(1, "dies")
        pool.add(2, "compiles")
        assert (await pool.compile())[1] == b"code"
        assert pool.ran == [1, 2]
        assert pool.events == ["compiler_lost"]

    virtual_time.run(test())


def test_a_program_that_kills_every_compiler_is_called_a_bug_and_not_retried() -> None:
    async def test() -> None:
        pool = Pool()
        for number in range(1, 5):
            pool.add(number, "dies")
        with pytest.raises(StatusError, match="ended 3 compiler processes one after the other") as error:
            await pool.compile()
        assert error.value.status.code is Code.UNIMPLEMENTED
        assert pool.ran == [1, 2, 3]

    virtual_time.run(test())


def test_a_program_waits_for_a_compiler_that_is_still_to_come() -> None:
    async def test() -> None:
        pool = Pool()
        asyncio.get_running_loop().call_later(9.0, pool.add, 1, "compiles")
        assert (await pool.compile())[1] == b"code"

    virtual_time.run(test())


def test_without_a_compiler_a_program_fails_in_time() -> None:
    async def test() -> None:
        pool = Pool()
        with pytest.raises(StatusError, match="no compiler process") as error:
            await pool.compile()
        assert error.value.status.code is Code.DEADLINE_EXCEEDED
        assert asyncio.get_running_loop().time() == pytest.approx(10.0)

    virtual_time.run(test())


def test_a_compilation_that_never_ends_fails_in_time() -> None:
    async def test() -> None:
        pool = Pool()
        compiler = pool.add(1, "is silent")
        with pytest.raises(StatusError, match="compile_timeout_seconds"):
            await pool.compile()
        assert asyncio.get_running_loop().time() == pytest.approx(100.0)
        assert compiler.pending == {}

    virtual_time.run(test())


def test_a_silent_compiler_is_not_waited_for_when_its_host_is_lost() -> None:
    async def test() -> None:
        pool = Pool()
        silent = pool.add(1, "is silent", agent=5)
        pool.add(2, "compiles", agent=6)
        asyncio.get_running_loop().call_later(3.0, pool.pool.remove_agent, 5)
        assert (await pool.compile())[1] == b"code"
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)
        assert silent.link.closed  # type: ignore[attr-defined]

    virtual_time.run(test())


def test_what_programs_are_kept_under_is_known_before_the_first_is_looked_up() -> None:
    async def test() -> None:
        pool = Pool()
        asyncio.get_running_loop().call_later(2.0, pool.add, 1, "compiles")
        assert pool.pool.environment is None
        assert await pool.pool.known_environment() == "flags"
        # It does not change when all compilers are gone for a while.
        pool.pool.remove(1)
        assert await pool.pool.known_environment() == "flags"

    virtual_time.run(test())


def test_programs_of_different_hosts_are_not_taken_for_each_others() -> None:
    pool = Pool()
    pool.add(1, "compiles", environment="cpu b")
    pool.add(2, "compiles", environment="cpu b")
    assert pool.events == []
    assert pool.pool.environment == "cpu b"
    pool.add(3, "compiles", environment="cpu a")
    assert pool.events == ["compilers_differ"]
    # Which of them compiles is chance, and what it compiled stays in use when it has left.
    assert pool.pool.environment == "cpu a | cpu b"
    pool.pool.remove(3)
    assert pool.pool.environment == "cpu a | cpu b"


def test_the_least_busy_compiler_is_chosen() -> None:
    async def test() -> None:
        pool = Pool()
        for number in (1, 2, 3):
            pool.add(number, "compiles")
        await asyncio.gather(*(pool.compile() for _ in range(6)))
        assert sorted(pool.ran) == [1, 1, 2, 2, 3, 3]

    virtual_time.run(test())


def test_a_late_reply_is_nobodys() -> None:
    async def test() -> None:
        pool = Pool()
        compiler = pool.add(1, "is silent")
        pool.pool.on_reply(compiler, ["heartbeat"], [])
        pool.pool.on_reply(compiler, ["reply", 99, {}], [b""])
        assert compiler.pending == {}

    virtual_time.run(test())


@pytest.mark.parametrize("knows", [True, False])
def test_what_a_compilation_asks_is_answered_by_whoever_ordered_it(knows: bool) -> None:
    async def ask(question: bytes) -> bytes:
        assert question == b"question"
        await asyncio.sleep(1)
        if not knows:
            raise StatusError(Status(Code.UNKNOWN, "no idea"))
        return b"answer"

    async def test() -> None:
        pool = Pool()
        compiler = pool.add(1, "asks")
        assert await pool.pool.compile(b"program", b"options", 1, 2, ask) == ({}, b"code")
        assert pool.answers == [["answer", 7, b"answer"] if knows else ["unanswered", 7, "no idea"]]
        assert compiler.asked == {}

    virtual_time.run(test())


def test_a_compilation_that_nobody_can_answer_is_told_so() -> None:
    async def test() -> None:
        pool = Pool()
        pool.add(1, "asks")
        await pool.compile()
        [[kind, number, text]] = pool.answers
        assert (kind, number) == ("unanswered", 7) and text

    virtual_time.run(test())
