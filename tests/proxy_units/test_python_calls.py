"""Calls of colocated Python as the head sees them: which orders go to whom, and what becomes of the results."""

import types
from typing import Any

import pytest
from remembering_head import Answer, Head, RememberingLink

from ridgeway.cluster.executor_link import ExecutorLink
from ridgeway.cluster.python_processes import PythonProcess
from ridgeway.protocol import dtypes, messages, shardings
from ridgeway.protocol.status import Code, Status, StatusError, data_loss
from ridgeway.proxy import python_calls
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.compile_cache import CompileCache
from ridgeway.proxy.dispatch import Dispatcher
from ridgeway.proxy.programs import Programs
from ridgeway.proxy.python_calls import PythonProgram, SessionPython

F32 = 11
STREAM = 77


def sharding_of(devices: tuple[int, ...], tiled: bool = True) -> Any:
    proto = messages.ShardingProto()
    op_sharding = messages.OpSharding()
    if tiled:
        op_sharding.type = 3  # OTHER
        op_sharding.tile_assignment_dimensions.append(len(devices))
        op_sharding.tile_assignment_devices.extend(range(len(devices)))
    proto.MergeFromString(shardings.hlo_sharding_proto(devices, op_sharding.SerializeToString()))
    return shardings.parse(proto)


class Session:
    """One session over three hosts with two devices each."""

    def __init__(self) -> None:
        self.head = Head()
        self.executors = self.head.hosts()
        manager = self.head.manager
        programs = Programs(manager, CompileCache(None, 0), "test", lambda kind, **fields: None)
        self.dispatcher = Dispatcher(manager, programs)
        self.printed: list[tuple[Any, ...]] = []
        callbacks = types.SimpleNamespace(output=lambda *line: self.printed.append(line))
        services = types.SimpleNamespace(
            manager=manager, dispatcher=self.dispatcher, settings=manager.settings, callbacks=callbacks
        )
        self.python = SessionPython(services, 1)  # pyright: ignore[reportArgumentType]
        self.links: dict[int, RememberingLink] = {}

    def array(self, devices: tuple[int, ...], kind: int = F32, tiled: bool = True) -> Array:
        """An array that is there."""
        array = Array(kind, (len(devices),) if tiled else (), sharding_of(devices, tiled))
        executors = self.head.manager.executors_of(devices)
        assert not isinstance(executors, Status)
        array.bind(self.dispatcher.new_group(executors))
        return array

    def call(self, *arguments: Array, outputs: int = 1, kind: int = F32) -> tuple[list[Array], Answer]:
        """Call a function with results like its first argument."""
        first = arguments[0]
        specs = [(a.kind, a.shape, a.sharding) for a in arguments]
        results = [Array(kind, first.shape, first.sharding) for _ in range(outputs)]
        program = PythonProgram("5", "f", first.devices, specs, [specs[0]] * outputs, b"pickle")
        self.python.add(9, program)
        answer = Answer()
        self.python.call(program, list(arguments), results, STREAM, answer)
        return results, answer

    def processes(self) -> list[PythonProcess]:
        return list(self.head.manager.pythons)

    def join(self, process: PythonProcess) -> RememberingLink:
        link = self.links[process.number] = RememberingLink()
        self.head.manager.pythons.joined(process.number, link, "10.0.0.2", 4000 + process.number, 1)  # pyright: ignore
        return link

    def say(self, process: PythonProcess, *message: Any, buffers: tuple[bytes, ...] = ()) -> None:
        process.on_message(process, list(message), list(buffers))

    def frees(self, executor: ExecutorLink) -> list[int]:
        executor.flush_frees()
        return [group for order in self.head.sent(executor, "free") for group in order[1]]


@pytest.fixture
def session() -> Session:
    return Session()


def test_each_host_is_sent_its_own_shards_and_asked_for_its_own(session: Session) -> None:
    [result], answer = session.call(session.array((0, 1, 2, 3)), session.array((0, 1, 2, 3), tiled=False))
    first, second = session.processes()
    assert [process.slot for process in (first, second)] == [0, 1]
    assert session.head.sent(session.executors[0], "send") == []  # where to is not known yet
    links = [session.join(process) for process in (first, second)]
    for slot, link in enumerate(links):
        welcome, load, call = link.sent
        assert welcome == ["welcome", {"lost_objects": {}}] and load == ["load", "5", "f"]
        _, number, program, stream, arguments, results, executor, address = call
        mine = [2 * slot, 2 * slot + 1]
        assert (number, program, stream) == (1, "5", STREAM)
        assert [devices for devices, _, _ in arguments[0]] == [[d] for d in mine]
        assert [devices for devices, _, _ in arguments[1]] == [mine]  # both have all of it: it is sent once
        assert [devices for devices, _ in results[0]] == [[d] for d in mine]
        assert (executor, address) == (session.executors[slot].number, ["10.0.0.2", 7])
        sends = session.head.sent(session.executors[slot], "send")
        tokens = [token for parts in arguments for _, token, _ in parts]
        assert [order[3] for order in sends] == [
            [[token, "10.0.0.2", 4000 + slot + 1, -(slot + 1), None]] for token in tokens
        ]
    assert result.held is not None and result.groups is None and answer.answers == []
    session.say(first, "done", 1, [])
    assert result.held is not None and answer.answers == []
    session.say(second, "done", 1, [])
    assert result.held is None and result.groups is not None and answer.answers == [None]
    for slot, link in enumerate(links):
        [copy] = session.head.sent(session.executors[slot], "copy")
        assert [(devices, pieces[0][4]) for devices, _, _, pieces in copy[4]] == [
            (devices, token) for devices, token in link.of("call")[0][5][0]
        ]


def test_what_uses_a_result_waits_for_it(session: Session) -> None:
    [result], _ = session.call(session.array((0,)))
    ready, fetched = Answer(), []
    session.dispatcher.ready([result], ready)
    session.dispatcher.fetch(result, None, lambda error, data: fetched.append(error))
    [process] = session.processes()
    session.join(process)
    assert session.head.sent(session.executors[0], "fetch") == []
    session.say(process, "done", 1, [])
    assert len(session.head.sent(session.executors[0], "fetch")) == 1
    assert len(session.head.sent(session.executors[0], "ready")) == 1


def test_the_next_call_is_ordered_at_once_and_fed_when_its_argument_is_there(session: Session) -> None:
    [one], _ = session.call(session.array((0,)))
    [process] = session.processes()
    link = session.join(process)
    [two], _ = session.call(one)
    one.release()
    assert [call[1] for call in link.of("call")] == [1, 2]
    assert len(session.head.sent(session.executors[0], "send")) == 1
    session.say(process, "done", 1, [])
    assert len(session.head.sent(session.executors[0], "send")) == 2
    assert two.held is not None


def test_the_first_error_is_everybodys_and_what_others_made_is_freed(session: Session) -> None:
    [result], answer = session.call(session.array((0, 1, 2, 3)))
    first, second = session.processes()
    session.join(first)
    session.join(second)
    ready = Answer()
    session.dispatcher.ready([result], ready)
    session.say(first, "failed", 1, int(Code.UNKNOWN), "it raised", 0)
    wrong = Status(Code.UNKNOWN, "it raised")
    assert (result.error, answer.answers, ready.answers) == (wrong, [wrong], [wrong])
    session.say(second, "done", 1, [])
    for executor in session.executors[:2]:
        [copy] = session.head.sent(executor, "copy")
        assert session.frees(executor)[-1] == copy[1]
    assert answer.answers == [wrong]


def test_a_lost_process_is_told_of_and_remembered(session: Session) -> None:
    session.call(session.array((0,)))
    [process] = session.processes()
    session.join(process)
    session.say(process, "objects", "5", "Counter.add", [123])
    session.say(process, "done", 1, [])
    [result], answer = session.call(session.array((0,)))
    session.head.manager.pythons.exited(process.number, -9)
    [status] = answer.answers
    assert status is not None and status.code is Code.DATA_LOSS and status == result.error
    assert "slice 0 host 0" in status.message and "'Counter.add'" not in status.message and "'f'" in status.message
    session.call(session.array((0,)))
    [again] = session.processes()
    assert again.number != process.number
    assert session.join(again).sent[0][1]["lost_objects"] == {
        123: "the Python process of slice 0 host 0 was lost: killed by SIGKILL"
    }


def test_an_argument_that_is_an_error_fails_the_call_without_a_process(session: Session) -> None:
    broken = session.array((0,))
    broken.fail(data_loss("gone"))
    [result], answer = session.call(broken)
    assert result.error == data_loss("gone") and answer.answers == [data_loss("gone")]
    assert session.processes() == []


def test_a_host_that_is_down_fails_the_call(session: Session) -> None:
    argument = session.array((2,))
    session.head.close_agent(session.executors[1])
    argument.error = None
    [result], _ = session.call(Array(F32, (1,), argument.sharding))
    assert result.error is not None and result.error.code is Code.DATA_LOSS and "slice 1 host 0" in result.error.message


def test_an_executor_lost_before_the_results_were_taken_loses_them(session: Session) -> None:
    [result], answer = session.call(session.array((0,)))
    [process] = session.processes()
    link = session.join(process)
    session.head.close_executor(session.executors[0])
    assert link.of("peer_lost")[0][1] == session.executors[0].number
    session.say(process, "done", 1, [])
    assert result.error is not None and result.error.code is Code.DATA_LOSS
    assert len(answer.answers) == 1


def test_a_process_whose_host_has_lost_its_place_is_not_used_any_more(session: Session) -> None:
    session.call(session.array((0,)))
    [process] = session.processes()
    session.join(process)
    session.say(process, "objects", "5", "Counter.add", [123])
    session.say(process, "done", 1, [])
    other = session.head.manager.agents[session.executors[1].agent]
    process.agent = other
    session.call(session.array((0,)))
    [again] = session.processes()
    assert again is not process and again.agent.number == session.executors[0].agent
    assert session.head.links[other.number].of("kill_python")[0][1] == process.number
    assert list(session.join(again).sent[0][1]["lost_objects"]) == [123]


def test_strings_stay_on_the_head(session: Session) -> None:
    [result], answer = session.call(session.array((0, 1)), kind=dtypes.KIND_STRING)
    [process] = session.processes()
    call = session.join(process).of("call")[0]
    assert call[5] == [[]] and result.held is None
    values: list[Any] = []
    assert result.strings is not None
    for shard in result.strings:
        shard.when_here(values.append)
    session.say(process, "done", 1, [[0, 1, 0], [0, 0, 1]], buffers=(b"one", b"zero"))
    assert sorted(values) == [b"one", b"zero"] and answer.answers == [None]
    assert session.head.sent(session.executors[0], "copy") == []


def test_one_that_does_not_return_is_killed(session: Session) -> None:
    [result], answer = session.call(session.array((0,)))
    [process] = session.processes()
    session.join(process)
    session.head.now += session.head.manager.settings.python_call_timeout_seconds + 1
    session.python.tick()
    [status] = answer.answers
    assert status is not None and status.code is Code.DEADLINE_EXCEEDED and status == result.error
    assert "'f' did not end within 3600 s (python_call_timeout_seconds)" in status.message
    assert session.head.links[session.executors[0].agent].of("kill_python")[0][1] == process.number


def test_too_many_calls_at_once_are_refused(session: Session) -> None:
    limit = session.head.manager.settings.pending_order_limit
    answers = [session.call(session.array((0,)))[1] for _ in range(limit + 1)]
    assert [len(answer.answers) for answer in answers] == [0] * limit + [1]
    [status] = answers[-1].answers
    assert status is not None and status.code is Code.RESOURCE_EXHAUSTED


def test_dropping_a_program_unloads_it_and_the_end_ends_all(session: Session) -> None:
    [result], answer = session.call(session.array((0,)))
    [process] = session.processes()
    link = session.join(process)
    session.python.drop(9)
    assert link.of("unload") == [["unload", ["5"]]]
    session.say(process, "output", "stdout", "a line")
    assert session.printed == [(1, "slice 0 host 0", "stdout", "a line")]
    session.python.close()
    assert link.closed and session.processes() == [] and answer.answers == []
    [copy] = session.head.sent(session.executors[0], "copy")  # what was sent meanwhile stays nowhere
    assert copy[1] in session.frees(session.executors[0])
    assert result.error is not None


def program_proto(**changes: Any) -> Any:
    proto = messages.CustomCallProgramProto(
        type="jax_colocated_python_v0.0.1", name="add_output_specs_and_push_result", serialized_program_text=b"pickle"
    )
    proto.devices.device_ids.extend(changes.get("devices", [0, 1]))
    spec = proto.input_specs.add()
    spec.dtype.kind = F32
    spec.shape.dims.append(2)
    spec.sharding.MergeFromString(shardings.hlo_sharding_proto(changes.get("of_argument", (0, 1)), b""))
    if "type" in changes:
        proto.type = changes["type"]
    return proto


def test_a_program_is_read_from_what_jax_sends() -> None:
    program = python_calls.parse(program_proto().SerializeToString(), 4)
    assert (program.name, program.devices, program.outputs, program.pickled) == ("add", (0, 1), [], b"pickle")
    [(kind, shape, sharding)] = program.inputs
    assert (kind, shape, sharding.devices) == (F32, (2,), (0, 1))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"type": "something_else"}, Code.UNIMPLEMENTED),
        ({"devices": []}, Code.INVALID_ARGUMENT),
        ({"devices": [0, 4]}, Code.INVALID_ARGUMENT),
        ({"devices": [-1]}, Code.INVALID_ARGUMENT),
        ({"of_argument": (0, 2)}, Code.INVALID_ARGUMENT),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], code: Code) -> None:
    with pytest.raises(StatusError) as caught:
        python_calls.parse(program_proto(**changes).SerializeToString(), 4)
    assert caught.value.status.code is code


def test_arguments_must_be_those_of_the_specs(session: Session) -> None:
    program = python_calls.parse(program_proto().SerializeToString(), 4)
    whole = sharding_of((0, 1), tiled=False)
    python_calls.check_arguments(program, [Array(F32, (2,), whole)])
    wrong = [
        [], [Array(F32, (3,), whole)], [Array(F32 + 1, (2,), whole)],
        [Array(F32, (2,), sharding_of((1, 0), tiled=False))],
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(StatusError) as caught:
            python_calls.check_arguments(program, arguments)
        assert caught.value.status.code is Code.INVALID_ARGUMENT
