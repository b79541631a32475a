"""Every semi-private call of jaxlib that a worker makes, with real clients: fails loudly when one of them changes.

Each scenario (see `runtime_scenarios`) runs in a process of its own.
"""

import signal
from collections.abc import Iterator
from typing import Any

import forking
import pytest
from forking import Lab, ScenarioFailed


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[Lab]:
    with forking.lab_of("runtime_scenarios") as lab:
        yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    yield shared_lab
    shared_lab.clear_away()


@pytest.fixture(scope="module")
def programs(shared_lab: Lab) -> dict[str, Any]:
    """Compiled once; executables load in any process."""
    return shared_lab.run("compile_all")


@pytest.fixture(scope="module")
def services() -> Iterator[forking.Services]:
    with forking.rendezvous() as found:
        yield found


# ---- compiling


def test_a_compiled_program_is_described(lab: Lab, programs: dict[str, Any]) -> None:
    found = lab.run("describe_programs", programs)
    single, pair = found["single"], found["pair"]
    assert single["name"] == "jit_affine"
    assert single["inputs"] == [[[2, 3], 11], [[3, 2], 11]]
    assert single["outputs"] == [[[2, 2], 11], [[], 11]]
    assert single["donated"] == []
    assert found["donated"] == [0]
    assert single["output_memory_kinds"] == ["device", "device"]
    assert single["parameter_layouts"] == ["{1,0}", "{1,0}"]
    assert single["cost_analysis"]["flops"] > 0
    assert single["memory_stats"]["argument_size_in_bytes"] == 48
    assert pair["outputs"] == [[[4], 11], [[], 11]]
    assert len(pair["parameter_shardings"]) == 1
    assert len(pair["output_shardings"]) == 2
    assert all(isinstance(sharding, bytes) for sharding in pair["output_shardings"])
    assert "all-reduce" in found["text"]


def test_what_is_no_program_is_refused_as_the_clients_mistake(lab: Lab) -> None:
    found = lab.run("compile_nonsense")
    assert len(found) == 3
    assert {code for code, _ in found} == {3}
    assert "no function 'main'" in found[0][1]
    assert all("not a StableHLO artifact" in text for _, text in found[1:])
    assert lab.run("signature_of_untyped") == 3


# ---- buffers


def test_buffers_of_every_kind_are_put_and_copied(lab: Lab) -> None:
    assert lab.run("put_and_copy")[-2:] == ["uint64", "int16"]


def test_what_was_put_does_not_change_with_the_memory_it_came_from(lab: Lab) -> None:
    assert lab.run("put_copies") == list(range(8))


def test_memory_is_told_by_device(lab: Lab) -> None:
    assert lab.run("memory_stats") == [4, 5]


# ---- executing


def test_a_program_runs_on_any_device(lab: Lab, programs: dict[str, Any]) -> None:
    lab.run("execute_on_one_device", programs)


def test_a_program_that_calls_lapack_runs_in_a_process_that_never_lowered_one(
    lab: Lab, programs: dict[str, Any]
) -> None:
    lab.run("execute_lapack", programs)


def test_a_program_runs_on_two_devices_in_either_order(lab: Lab, programs: dict[str, Any]) -> None:
    lab.run("execute_on_two_devices", programs)


def test_a_donated_buffer_is_gone_and_a_copy_is_not(lab: Lab, programs: dict[str, Any]) -> None:
    lab.run("donate", programs)


def test_buffers_are_drained_from_one_runtime_and_used_on_another(lab: Lab, programs: dict[str, Any]) -> None:
    lab.run("drain_and_go_on", programs)


def test_a_poisoned_buffer_is_refused_with_its_own_error(lab: Lab, programs: dict[str, Any]) -> None:
    lab.run("poisoned_arguments", programs)


# ---- generations


def through_generations(
    lab: Lab, programs: dict[str, Any], services: forking.Services, first_devices: list[int], per_host: int, count: int
) -> list[int]:
    members = [
        lab.start("live_through_generations", programs, rank, first_devices, per_host)
        for rank in range(len(first_devices))
    ]
    for _ in range(count):
        service = services.new()
        for member in members:
            member.send(service)
        assert [member.receive() for member in members] == ["computed"] * len(members)
        for member in members:
            member.send("leave")
        assert [member.receive() for member in members] == ["left"] * len(members)
        # Only now: a client that is still attached would end its process.
        services.close(service)
    for member in members:
        member.send(None)
    return [member.receive() for member in members]


def test_two_processes_compute_together_in_one_generation_after_the_other(
    lab: Lab, programs: dict[str, Any], services: forking.Services
) -> None:
    # Sockets of past generations do not pile up.
    assert through_generations(lab, programs, services, [0, 1], 1, count=3) == [0, 0]


def test_two_processes_with_two_devices_each_compute_together(
    lab: Lab, programs: dict[str, Any], services: forking.Services
) -> None:
    through_generations(lab, programs, services, [4, 8], 2, count=1)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_of_a_peer_are_released_by_the_abort_and_go_on(
    lab: Lab, programs: dict[str, Any], services: forking.Services, fate: signal.Signals
) -> None:
    first = services.new()
    members = [lab.start("survive", programs, rank) for rank in range(3)]
    for member in members:
        member.send(first)
    assert [member.receive() for member in members] == ["ready"] * 3
    for member in members:
        member.send("go")
    assert [member.receive() for member in members] == ["started", "started", "waiting"]
    members[2].signal(fate)
    survivors = members[:2]
    for member in survivors:
        member.send("abort")
    assert [member.receive() for member in survivors] == ["left", "left"]
    services.close(first)
    second = services.new()
    for member in survivors:
        member.send(second)
    for rank, member in enumerate(survivors):
        found = member.receive()
        if fate is signal.SIGSTOP:
            assert found["was blocked"]
        assert found["texts"], "the execution went through without its peer"
        assert found["collective"], found["texts"]
        assert found["kept"], "what lay on the survivor was not kept"
        assert all(found["poisoned"]), "what was not computed is no error"
        assert (found["lost"], found["stuck"]) == (len(found["poisoned"]), 0)
        assert found["held"] == rank
        assert found["leaked"] == 0, "something holds the client that was left"
    services.close(second)


def test_entering_without_the_other_members_is_ended_by_the_abort(
    lab: Lab, programs: dict[str, Any], services: forking.Services
) -> None:
    for scenario in ("enter_in_vain", "enter_after_the_abort"):
        service = services.new()
        member = lab.start(scenario, programs)
        member.send(service)
        assert member.receive(), f"{scenario} succeeded"
        services.close(service)


def test_entering_where_nobody_serves_ends_with_an_error(lab: Lab) -> None:
    assert "refused" in lab.run("enter_at_a_dead_address")


# ---- promises and errors


def test_promised_bytes_and_the_news_that_none_will_come_may_arrive_in_any_order(lab: Lab) -> None:
    lab.run("promises_in_any_order")


def test_bytes_are_not_waited_for_when_the_generation_has_ended(lab: Lab) -> None:
    lab.run("waiting_for_bytes_ends_with_the_generation")


def test_bringing_much_to_host_memory_is_progress(lab: Lab) -> None:
    lab.run("draining_much_is_progress")


def test_an_error_is_described_by_its_first_cause(lab: Lab) -> None:
    lab.run("errors_are_described")


# ---- the lab itself


def test_a_failing_scenario_fails_its_test(lab: Lab) -> None:
    with pytest.raises(ScenarioFailed, match="AttributeError"):
        lab.run("no_such_scenario")
    with pytest.raises(ScenarioFailed, match="TypeError"):
        lab.run("memory_stats", "one argument too many")
    scenario = lab.start("live_through_generations", {}, 0, [0], 1)
    scenario.kill()
    with pytest.raises(ScenarioFailed, match="exit code -9"):
        scenario.receive()
