"""The agent and its template as real processes, against a head's end that the test drives."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import fixture_children
import psutil
import pytest
from fixture_head import FOLDER, AgentUnderTest, FixtureHead, until

from ridgeway.settings import Settings
from ridgeway.worker import agent_core as core
from ridgeway.worker.agent import AgentProcess, build_parser

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks at processes through /proc")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def gone(processes: list[psutil.Process]) -> None:
    def left() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    await until(lambda: not left(), lambda: f"still running: {left()}")


def test_joins_and_says_who_it_is() -> None:
    async def test() -> None:
        async with FixtureHead(Settings()) as head:
            options = ("--slice", "2", "--host", "1", "--launch-id", "launch-7", "--address", "10.1.2.3")
            async with AgentUnderTest(head.port, *options) as worker:
                agent = await head.next_agent()
                assert agent.hello["role"] == "agent"
                assert (agent.hello["slice"], agent.hello["host"]) == (2, 1)
                assert agent.hello["standby"] is False
                assert agent.hello["pid"] == worker.pid
                assert agent.hello["launch_id"] == "launch-7"
                assert agent.hello["address"] == "10.1.2.3"
                assert set(agent.hello["versions"]) == {"ridgeway", "jax", "jaxlib", "python"}
                message = await agent.next("template_ready")
                assert message[1] >= 0.0

    run(test())


def test_starts_kills_and_reports_children() -> None:
    async def test() -> None:
        async with FixtureHead(Settings()) as head, AgentUnderTest(head.port) as worker:
            agent = await head.next_agent()
            agent.link.send(["start_executor", 1])
            agent.link.send(["start_compiler", 2])
            for number in (
                fixture_children.EXITS_WITH_7,
                fixture_children.KILLS_ITSELF,
                fixture_children.RAISES,
                fixture_children.REPORTS_DESCRIPTORS,
            ):
                agent.link.send(["start_executor", number])
            ends = {}
            for _ in range(4):
                _, role, number, code = await agent.next("process_exited")
                assert role == "executor"
                ends[number] = code
            assert ends == {
                fixture_children.EXITS_WITH_7: 7,
                fixture_children.KILLS_ITSELF: -signal.SIGILL,
                fixture_children.RAISES: 1,
                fixture_children.REPORTS_DESCRIPTORS: 0,
            }
            await worker.says("RuntimeError: a mistake in the executor")
            await worker.says("descriptors [0, 1, 2, 3] threads 1")
            await worker.says("descriptors ok True")
            agent.link.send(["kill_executor", 1, "it does not drain"])
            assert await agent.next("process_exited") == ["process_exited", "executor", 1, -signal.SIGKILL]
            await worker.says("it does not drain")

    run(test())


def test_a_child_is_given_what_it_needs_and_no_secret_shows_outside() -> None:
    async def test() -> None:
        async with FixtureHead(Settings(probe_hold_seconds=3.25)) as head:
            async with AgentUnderTest(head.port, "--slice", "0", "--host", "0", entry="fixture_echo") as worker:
                agent = await head.next_agent()
                agent.link.send(["start_executor", 1])
                await agent.next("process_exited")
                await until(lambda: "}" in worker.log)
                found = re.search(r"^ARGUMENTS (\{.*\})$", worker.log, re.MULTILINE)
                assert found is not None, worker.log
                arguments = json.loads(found[1])
                assert set(arguments) == {
                    "head_host", "head_port", "secret", "agent", "executor", "devices_per_host", "settings",
                    "address", "log_prefix", "inherited", "template_descriptor", "head",
                }  # fmt: skip
                assert arguments["secret"] == head.secret
                assert arguments["settings"]["probe_hold_seconds"] == 3.25
                assert arguments["devices_per_host"] == 2
                assert arguments["address"] == "127.0.0.1"
                for process in [*descendants(worker.pid), psutil.Process(worker.pid)]:
                    assert head.secret not in " ".join(process.cmdline())
                for process in descendants(worker.pid):
                    assert head.secret not in process.environ().values()

    run(test())


@pytest.mark.parametrize("how", ["stop", "SIGINT", "SIGTERM", "SIGKILL", "link closed", "head silent"])
def test_nothing_outlives_the_agent(how: str) -> None:
    async def test() -> None:
        settings = Settings(heartbeat_interval_seconds=0.1, heartbeat_timeout_seconds=0.6, head_pause_seconds=2.0)
        place = ("--slice", "0", "--host", "0")
        async with FixtureHead(settings) as head, AgentUnderTest(head.port, *place) as worker:
            agent = await head.next_agent()
            agent.link.send(["start_executor", 1])
            agent.link.send(["start_compiler", 2])
            await worker.says("started compiler 2")
            processes = descendants(worker.pid)
            assert len(processes) == 3
            if how == "stop":
                agent.link.send(["stop", "the test is over"])
                expected, words = 0, "stopped by the head: the test is over"
            elif how == "SIGINT":
                os.kill(worker.pid, signal.SIGINT)
                expected, words = 0, "SIGINT"
            elif how == "SIGTERM":
                # To all of them, as some schedulers do it: only the agent heeds it, and leaves when the head says so.
                for pid in (worker.pid, *(process.pid for process in processes)):
                    os.kill(pid, signal.SIGTERM)
                assert await agent.next("preempted") == ["preempted", 30.0, "SIGTERM"]
                assert all(process.is_running() for process in processes)
                agent.link.send(["stop", "its state is saved"])
                expected, words = 0, "stopped by the head: its state is saved"
            elif how == "SIGKILL":
                os.kill(worker.pid, signal.SIGKILL)
                expected, words = -signal.SIGKILL, ""
            elif how == "link closed":
                agent.link.close()
                expected, words = 3, "the link to the head closed"
            else:
                await until(lambda: agent.beats > 2)
                head.answers_heartbeats = False
                expected, words = 3, "the head has been silent for"
            assert await worker.exit_code() == expected, worker.log
            assert words in worker.log
            assert (how == "head silent") == ("its host answers" in worker.log)
            await gone(processes)

    run(test())


def test_the_policy_wait_keeps_the_template_and_joins_the_next_head() -> None:
    async def test() -> None:
        settings = Settings(orphan_policy="wait", orphan_timeout_seconds=15.0)
        async with FixtureHead(settings) as first, AgentUnderTest(first.port, "--standby") as worker:
            agent = await first.next_agent()
            assert agent.hello["standby"] is True
            agent.link.send(["assign", 1, 0])
            agent.link.send(["start_executor", 1])
            await worker.says("started executor 1")
            template = psutil.Process(worker.pid).children()[0]
            executors = template.children()
            await first.__aexit__()
            await gone(executors)
            async with FixtureHead(settings, port=first.port) as second:
                again = await second.next_agent()
                assert (again.hello["slice"], again.hello["host"]) == (1, 0)
                assert again.hello["standby"] is False
                await again.next("template_ready")
                again.link.send(["start_executor", 1])
                await until(lambda: worker.log.count("started executor 1") == 2)
                assert template.is_running()
                # The end of the first head's executor is nothing to the second.
                again.link.send(["kill_executor", 1, "enough"])
                end = await again.next("process_exited")
                assert end == ["process_exited", "executor", 1, -9]
                assert again.received.empty()

    run(test())


def test_the_policy_wait_has_an_end() -> None:
    async def test() -> None:
        settings = Settings(orphan_policy="wait", orphan_timeout_seconds=0.3)
        async with FixtureHead(settings) as head, AgentUnderTest(head.port) as worker:
            await head.next_agent()
            await head.__aexit__()
            assert await worker.exit_code() == 3
            assert "no head came back" in worker.log

    run(test())


def test_refusals_are_one_line_and_exit_code_2() -> None:
    async def test() -> None:
        async with FixtureHead(Settings()) as head:
            head.refuse_with = "slice 0 host 0 is taken; choose another"
            async with AgentUnderTest(head.port, "--slice", "0", "--host", "0") as worker:
                assert await worker.exit_code() == 2
                assert worker.log.strip().endswith("refused by the head: slice 0 host 0 is taken; choose another")
                assert len(worker.log.strip().splitlines()) == 1
            async with AgentUnderTest(head.port, secret="another") as worker:
                assert await worker.exit_code() == 2
                assert "has another cluster secret" in worker.log
                assert len(worker.log.strip().splitlines()) == 1
        async with AgentUnderTest(head.port, "--connect-timeout-seconds", "0.2") as worker:
            assert await worker.exit_code() == 2
            assert f"no head answers at 127.0.0.1:{head.port}" in worker.log
            assert len(worker.log.strip().splitlines()) == 1

    run(test())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slice", "1"), "--slice and --host go together"),
        (("--slice", "1", "--host", "0", "--standby"), "--standby waits for any free place"),
        (("--slice", "-1", "--host", "0"), "count from 0"),
        (("--head", "nowhere"), "is not HOST:PORT"),
        (("--slice", "one", "--host", "0"), "invalid int value: 'one'"),
        (("--secret-file", "/nonexistent/secret"), "cannot read the secret file"),
        (("--entry-module", "executor"), "is not executor=MODULE"),
    ],
)
def test_wrong_command_lines(options: tuple[str, ...], words: str) -> None:
    async def test() -> None:
        async with AgentUnderTest(1, *options) as worker:
            assert await worker.exit_code() == 2
            assert words in worker.log
            assert len(worker.log.strip().splitlines()) == 1, worker.log

    run(test())


def test_signals_that_the_head_asks_for() -> None:
    async def test() -> None:
        async with FixtureHead(Settings()) as head, AgentUnderTest(head.port) as worker:
            agent = await head.next_agent()
            agent.link.send(["start_executor", 1])
            agent.link.send(["start_compiler", 2])
            await worker.says("started compiler 2")
            agent.link.send(["deliver_signal", "executor", int(signal.SIGKILL)])
            assert await agent.next("process_exited") == ["process_exited", "executor", 1, -signal.SIGKILL]
            processes = [psutil.Process(worker.pid), *descendants(worker.pid)]
            assert len(processes) == 3
            agent.link.send(["deliver_signal", "worker", int(signal.SIGSTOP)])
            await until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in processes))
            for process in processes:
                process.send_signal(signal.SIGCONT)
            agent.link.send(["deliver_signal", "worker", int(signal.SIGKILL)])
            assert await worker.exit_code() == -signal.SIGKILL
            await gone(processes)

    run(test())


def test_a_dead_template_is_replaced_and_its_children_reported() -> None:
    async def test() -> None:
        async with FixtureHead(Settings()) as head, AgentUnderTest(head.port) as worker:
            agent = await head.next_agent()
            await agent.next("template_ready")
            agent.link.send(["start_executor", 1])
            await worker.says("started executor 1")
            template = psutil.Process(worker.pid).children()[0]
            executors = template.children()
            template.kill()
            assert await agent.next("process_exited") == ["process_exited", "executor", 1, -signal.SIGKILL]
            await gone(executors)
            # Ordered before the new template is ready: it is made all the same.
            agent.link.send(["start_executor", 2])
            await worker.says("started executor 2")
            # No zombies: the orphaned executor was adopted and waited for.
            await until(lambda: all(p.pid != executors[0].pid for p in psutil.Process(worker.pid).children()))

    run(test())


def test_an_order_between_two_templates_is_not_lost() -> None:
    async def test() -> None:
        identity = core.Identity(
            head_host="127.0.0.1", head_port=1, secret="s", slice=0, host=0, standby=False, address="127.0.0.1",
            launch_id="", pid=os.getpid(), hostname="here", versions={},
        )  # fmt: skip
        options = build_parser().parse_args(
            ["--head=127.0.0.1:1", "--preload=", "--entry-module=executor=fixture_children"]
        )
        agent = AgentProcess(identity, Settings(), options)
        agent._exit_code = asyncio.get_running_loop().create_future()
        child = agent._core.children["executor", 7] = core.Child(1)
        agent._apply(core.StartTemplate())
        agent._apply(core.Fork("executor", 7, {"head_host": "127.0.0.1", "head_port": 1, "secret": "s"}))
        try:
            await until(lambda: child.pid is not None, lambda: "the order was dropped")
        finally:
            await agent._end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
        run(test())


def test_a_template_that_cannot_start_ends_the_agent_with_its_last_words() -> None:
    async def test() -> None:
        async with FixtureHead(Settings()) as head:
            async with AgentUnderTest(head.port, preload="module_that_is_not_there") as worker:
                assert await worker.exit_code() == 4
                last = worker.log.strip().splitlines()[-1]
                assert "3 times within 30 s" in last
                assert "No module named 'module_that_is_not_there'" in last

    run(test())


def test_a_stopped_agent_does_not_blame_the_head() -> None:
    async def test() -> None:
        settings = Settings(heartbeat_interval_seconds=0.1, heartbeat_timeout_seconds=1.0)
        async with FixtureHead(settings) as head, AgentUnderTest(head.port) as worker:
            agent = await head.next_agent()
            await until(lambda: agent.beats > 1)
            os.kill(worker.pid, signal.SIGSTOP)
            await asyncio.sleep(1.3)
            beats = agent.beats
            os.kill(worker.pid, signal.SIGCONT)
            await until(lambda: agent.beats > beats + 3)
            await worker.says("this process was stopped for")

    run(test())


def test_the_agent_imports_neither_jax_nor_numpy() -> None:
    async def test() -> None:
        code = "import sys, ridgeway.worker.agent; print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        output, _ = await child.communicate()
        assert output.strip() == b"[]"

    run(test())
