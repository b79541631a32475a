"""Handlers of requests about executables. Each: (session, request, response, later) -> None or LATER."""

import asyncio
import hashlib
import re
import time
from collections.abc import Callable
from typing import Any

from ridgeway.protocol import messages
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import OK, Status, StatusError, fill_status_proto
from ridgeway.proxy import plugin_programs, python_calls
from ridgeway.proxy.arrays import Array
from ridgeway.proxy.executables import Executable
from ridgeway.proxy.services import Handler
from ridgeway.proxy.session import LATER, Future, Session

XLA_PROGRAM = "xla::ifrt::XlaProgram"

Later = Callable[[Status | None], None]

_tasks: set[asyncio.Task[None]] = set()
"""Keeps running compilations from being collected."""


def _in_background(session: Session, name: str, work: Any, later: Later) -> None:
    async def guarded() -> None:
        try:
            await work
        except StatusError as error:
            later(error.status)
        except Exception as error:
            session.services.report_bug(name, error)
            later(statuses.internal(f"the proxy failed at {name}: {error!r}"))
        else:
            later(None)

    task = asyncio.get_running_loop().create_task(guarded())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def compile(session: Session, request: Any, response: Any, later: Later) -> Any:
    program = request.program
    if program.type_name == plugin_programs.PLUGIN_PROGRAM:
        _compile_plugin_program(session, program.data, response)
        return None
    if program.type_name == python_calls.PYTHON_PROGRAM:
        _compile_python_program(session, program.data, response)
        return None
    if program.type_name != XLA_PROGRAM:
        raise statuses.unimplemented(f"programs of type {program.type_name} are not supported").error()
    options = messages.XlaCompileOptionsProto.FromString(request.compile_options.data).compile_options
    assignment = _take_assignment(session, options)
    serialized_options = options.SerializeToString(deterministic=True)

    async def work() -> None:
        over = session.services.observer.compiling(session)
        try:
            compiled = await session.services.programs.compile(
                program.data, serialized_options, len(assignment), len(assignment[0]), session.number,
                lambda question: session.services.callbacks.ask(session.number, question),
            )
        finally:
            over()
        if session.ended:
            return
        callbacks = dict(session.callbacks.load(serialized) for serialized in request.host_callbacks)
        response.loaded_host_callback_handles.extend(callbacks)
        executable = Executable(compiled, assignment, callbacks)
        session.services.programs.retain(executable)
        handle = session.new_handle()
        session.executables[handle] = executable
        response.loaded_executable_handle = handle
        response.name = executable.name
        response.num_devices = len(executable.devices)
        response.device_ids.extend(executable.devices)
        response.addressable_device_ids.extend(executable.devices)
        response.fingerprint_value = compiled.key.encode()
        response.ready_future_handle, _ = session.new_future(OK)

    _in_background(session, "compile", work(), later)
    return LATER


def _compile_plugin_program(session: Session, data: bytes, response: Any) -> None:
    program = plugin_programs.parse(data)
    handle = session.new_handle()
    session.plugin_programs[handle] = program
    _describe_request(session, handle, program.name, program.devices, data, response)


def _compile_python_program(session: Session, data: bytes, response: Any) -> None:
    program = python_calls.parse(data, session.services.manager.topology.devices)
    handle = session.new_handle()
    session.python.add(handle, program)
    _describe_request(session, handle, program.name, program.devices, data, response)


def _describe_request(
    session: Session, handle: int, name: str, devices: tuple[int, ...], data: bytes, response: Any
) -> None:
    """The answer to compiling what is not compiled."""
    response.loaded_executable_handle = handle
    response.name = name
    response.num_devices = len(devices)
    response.device_ids.extend(devices)
    response.addressable_device_ids.extend(devices)
    response.fingerprint_value = hashlib.sha256(data).hexdigest().encode()
    response.ready_future_handle, _ = session.new_future(OK)


def _is_request(session: Session, handle: int) -> bool:
    """Whether a handle is that of something that was not compiled."""
    return handle in session.plugin_programs or session.python.get(handle) is not None


_NO_DETAILS = statuses.unimplemented("a request to the server has no properties of a compiled program")


def _execute_plugin_program(
    session: Session, program: plugin_programs.PluginProgram, request: Any, response: Any
) -> None:
    future = Future()
    arguments = [session.array(handle) for handle in request.args_handles]
    results = program.execute(session, arguments, future.resolve)
    _bind_results(session, program.name, results, request, response)
    if request.execute_options.fill_status or request.result_status_handle:
        response.status_handle = session.keep_future(future, request.result_status_handle)


def _call_python(session: Session, program: python_calls.PythonProgram, request: Any, response: Any) -> None:
    arguments = [session.array(handle) for handle in request.args_handles]
    python_calls.check_arguments(program, arguments)
    results = [Array(kind, shape, sharding) for kind, shape, sharding in program.outputs]
    _bind_results(session, program.name, results, request, response)
    done = None
    if request.execute_options.fill_status or request.result_status_handle:
        response.status_handle, future = session.new_future(None, request.result_status_handle)
        done = future.resolve
    session.python.call(program, arguments, results, request.execute_options.execution_stream_id, done)


def _bind_results(session: Session, name: str, results: list[Array], request: Any, response: Any) -> None:
    given = request.result_array_handle
    if given and len(given) != len(results):
        raise statuses.invalid_argument(f"{name} has {len(results)} results, not {len(given)}").error()
    for index, result in enumerate(results):
        handle = session.bind_array(given[index] if given else 0, result)
        if not given:
            output = response.outputs.add(array_handle=handle)
            output.dtype.kind = result.kind
            output.shape.dims.extend(result.shape)
            output.sharding.serialized_sharding.type_name = result.sharding.type_name
            output.sharding.serialized_sharding.data = result.sharding.data


def _take_assignment(session: Session, options: Any) -> tuple[tuple[int, ...], ...]:
    """The device ids by replica and partition, cleared from the options so that they do not distinguish programs. A
    program that says only how many it needs gets the first ones, as `get_default_device_assignment` tells them."""
    build = options.executable_build_options
    given = build.device_assignment
    if given.computation_devices:
        assignment = tuple(
            tuple(int(computation.replica_device_ids[replica]) for computation in given.computation_devices)
            for replica in range(given.replica_count)
        )
    else:
        partitions = max(1, build.num_partitions)
        assignment = tuple(
            tuple(range(replica * partitions, (replica + 1) * partitions))
            for replica in range(max(1, build.num_replicas))
        )
    known = session.services.manager.topology.devices
    if any(not 0 <= device < known for row in assignment for device in row):
        raise statuses.invalid_argument(f"a program for devices {assignment}; this cluster has 0..{known - 1}").error()
    build.ClearField("device_assignment")
    build.ClearField("device_ordinal")
    # Controllers of jax 0.12 ask for shardings over named meshes. XLA translates back what an executable says of its
    # own only since 0.12, and the client of 0.12 ends the user's process over the first named one that it is told of.
    if session.services.versions["jaxlib"].startswith("0.11."):
        build.debug_options.xla_enable_hlo_sharding_v3 = False
    return assignment


def loaded_executable_metadata(session: Session, request: Any, response: Any, later: Later) -> None:
    if _is_request(session, request.loaded_executable_handle):
        # The client takes an error about donated inputs or memory kinds for one of compiling.
        for name in ("parameter_layouts", "output_layouts", "compiled_memory_stats"):
            fill_status_proto(getattr(response, f"{name}_error"), _NO_DETAILS)
        response.donated_input_indices.SetInParent()
        response.output_memory_kinds.status.SetInParent()
        return
    executable = session.executable(request.loaded_executable_handle)
    metadata = executable.compiled.metadata
    for name in ("parameter_shardings", "output_shardings"):
        values = metadata[name]
        if values is not None:
            field = getattr(response, name)
            field.SetInParent()
            for value in values:
                field.shardings.append(messages.OpSharding.FromString(value))
    for name in ("parameter_layouts", "output_layouts"):
        _fill_layouts(response, name, metadata[name])
    response.output_memory_kinds.status.SetInParent()
    kinds = response.output_memory_kinds.memory_kind_lists.add()
    kinds.memory_kinds.extend(metadata["output_memory_kinds"])
    response.donated_input_indices.SetInParent()
    response.donated_input_indices.donated_input_indices.extend(metadata["donated"])
    stats = response.compiled_memory_stats
    stats.SetInParent()
    names = {field.name for field in stats.DESCRIPTOR.fields}
    for name, value in metadata["memory_stats"].items():
        if name in names:
            setattr(stats, name, value)
    response.size_of_generated_code_in_bytes = metadata["generated_code_bytes"]


_LAYOUT = re.compile(r"\{([\d,]*)(?::E\((\d+)\))?\}")


def _fill_layouts(response: Any, name: str, texts: list[str]) -> None:
    parsed = [_LAYOUT.fullmatch(text) for text in texts]
    if None in parsed:
        error = statuses.unimplemented("layouts with tiles are not described")
        fill_status_proto(getattr(response, name + "_error"), error)
        return
    listed = getattr(response, name + "_list")
    listed.SetInParent()
    for match in parsed:
        assert match is not None
        layout = listed.layouts.add()
        layout.minor_to_major.extend(int(n) for n in match[1].split(",") if n)
        if match[2]:
            layout.element_size_in_bits = int(match[2])


def loaded_executable_execute(session: Session, request: Any, response: Any, later: Later) -> None:
    plugin_program = session.plugin_programs.get(request.loaded_executable_handle)
    if plugin_program is not None:
        _execute_plugin_program(session, plugin_program, request, response)
        return
    python_program = session.python.get(request.loaded_executable_handle)
    if python_program is not None:
        _call_python(session, python_program, request, response)
        return
    executable = session.executable(request.loaded_executable_handle)
    services = session.services
    options = request.execute_options
    arrays = session.arrays
    try:
        arguments = [arrays[handle] for handle in request.args_handles]
    except KeyError as missing:
        raise statuses.invalid_argument(f"this session has no array {missing}").error() from None
    if len(arguments) != executable.arguments:
        raise statuses.invalid_argument(
            f"{executable.name} takes {executable.arguments} arguments, not {len(arguments)}"
        ).error()
    results = [Array(kind, shape, sharding) for kind, shape, sharding in executable.outputs]
    given = request.result_array_handle
    if given and len(given) != len(results):
        raise statuses.invalid_argument(f"{executable.name} has {len(results)} results, not {len(given)}").error()
    if given:
        for handle, result in zip(given, results, strict=True):
            session.bind_array(handle, result)
    else:
        response.MergeFrom(executable.response)
        for output, result in zip(response.outputs, results, strict=True):
            output.array_handle = session.bind_array(0, result)
    watchers: list[Callable[[Status | None], None]] = []
    if options.fill_status or request.result_status_handle:
        response.status_handle, future = session.new_future(None, request.result_status_handle)
        watchers.append(future.resolve)
    if executable.callbacks:
        executable.running += 1
        watchers.append(lambda _: _execution_ended(session, executable))
    if services.observer.executing(session, executable):
        started = time.monotonic()
        watchers.append(lambda status: services.observer.executed(session, executable, started, status))

    def done(status: Status | None) -> None:
        for watcher in watchers:
            watcher(status)

    services.dispatcher.execute(
        executable, arguments, results, options.non_donatable_input_indices, done if watchers else None
    )


def loaded_executable_fetch_execute_result(session: Session, request: Any, response: Any, later: Later) -> Any:
    return _await_future(session, request.result_status_handle, later)


def check_future(session: Session, request: Any, response: Any, later: Later) -> Any:
    return _await_future(session, request.future_handle, later)


def _await_future(session: Session, handle: int, later: Later) -> Any:
    future = session.futures.pop(handle, None)
    if future is None:
        raise statuses.invalid_argument(f"this session has no future {handle}").error()
    future.when_done(later)
    return LATER


def loaded_executable_cost_analysis(session: Session, request: Any, response: Any, later: Later) -> None:
    executable = session.executable(request.loaded_executable_handle)
    response.attributes.version_number = 0
    for name, value in executable.compiled.metadata["cost_analysis"].items():
        response.attributes.attributes[name].float_value = value


def loaded_executable_human_readable_program_text(session: Session, request: Any, response: Any, later: Later) -> Any:
    compiled = session.executable(request.loaded_executable_handle).compiled

    async def work() -> None:
        response.human_readable_program_text = await session.services.manager.compilers.program_text(
            compiled.serialized, compiled.options, compiled.replicas, compiled.partitions
        )

    _in_background(session, "human_readable_program_text", work(), later)
    return LATER


def loaded_executable_delete(session: Session, request: Any, response: Any, later: Later) -> None:
    if not _is_request(session, request.loaded_executable_handle):
        session.executable(request.loaded_executable_handle)
    response.future_handle, _ = session.new_future(OK)


def loaded_executable_is_deleted(session: Session, request: Any, response: Any, later: Later) -> None:
    handle = request.loaded_executable_handle
    response.is_deleted = handle not in session.executables and not _is_request(session, handle)


def loaded_executable_destruct(session: Session, request: Any, response: Any, later: Later) -> None:
    program = session.plugin_programs.pop(request.loaded_executable_handle, None)
    if program is not None:
        plugin_programs.close(program, session)
    session.python.drop(request.loaded_executable_handle)
    executable = session.executables.pop(request.loaded_executable_handle, None)
    if executable is not None:
        executable.dropped = True
        if not executable.running:
            _release(session, executable)


def _release(session: Session, executable: Executable) -> None:
    session.callbacks.unload(tuple(executable.callbacks))
    session.services.programs.release(executable)


def _execution_ended(session: Session, executable: Executable) -> None:
    """Callbacks are answered until the last execution that may call them has ended."""
    executable.running -= 1
    if executable.dropped and not executable.running:
        _release(session, executable)


def loaded_host_callback_poll(session: Session, request: Any, response: Any, later: Later) -> Any:
    session.callbacks.poll(request.loaded_host_callback_handle, later)
    return LATER


def loaded_host_callback_return(session: Session, request: Any, response: Any, later: Later) -> None:
    raise statuses.invalid_argument("results of host callbacks come over the plugin's stream").error()


def loaded_executable_mpmd_metadata(session: Session, request: Any, response: Any, later: Later) -> None:
    raise statuses.unimplemented(
        "MPMD executables are not supported: each program here is compiled as one SPMD program for all its devices"
    ).error()


loaded_executable_mpmd_cost_analysis = loaded_executable_mpmd_metadata


HANDLERS: dict[str, Handler] = {
    name: globals()[name]
    for name in (
        "compile", "loaded_executable_metadata", "loaded_executable_execute", "loaded_executable_fetch_execute_result",
        "check_future", "loaded_executable_cost_analysis", "loaded_executable_human_readable_program_text",
        "loaded_executable_delete", "loaded_executable_is_deleted", "loaded_executable_destruct",
        "loaded_host_callback_poll", "loaded_host_callback_return", "loaded_executable_mpmd_metadata",
        "loaded_executable_mpmd_cost_analysis",
    )
}  # fmt: skip
