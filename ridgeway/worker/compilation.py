"""Compiling a client's program: the second and last place with semi-private jaxlib calls in `ridgeway.worker`.

* ``stablehlo.deserialize_portable_artifact``, ``mlir.make_ir_context``: reading a client's program.
* ``Client.compile_and_load`` / ``serialize_executable``: the executable loads on any client of the same jaxlib,
  whatever its processes and devices (measured on CPU), so it is compiled once, on a client made for that alone.
"""

import contextlib
import gc
import importlib.metadata
import os
import threading
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jaxlib import _jax, xla_client  # pyright: ignore[reportAttributeAccessIssue]  # jaxlib ships no types
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from ridgeway.protocol import compiler_callbacks, dtypes
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Code, Status
from ridgeway.worker.host_cpu import cpu_identity
from ridgeway.worker.partitioning import Ask, Questions, nobody

_MEMORY_STATS = (
    "generated_code_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes",
    "temp_size_in_bytes", "host_generated_code_size_in_bytes", "host_argument_size_in_bytes",
    "host_output_size_in_bytes", "host_alias_size_in_bytes", "host_temp_size_in_bytes", "peak_memory_in_bytes",
)  # fmt: skip
JAXLIB_VERSION = importlib.metadata.version("jaxlib")
_CLIENT_LIMIT = 2

_clients: dict[int, Any] = {}
_clients_lock = threading.Lock()


def _client(devices: int) -> Any:
    """A client with so many devices; few are kept, since each has about four threads per device."""
    with _clients_lock:
        client = _clients.get(devices)
        if client is None:
            while len(_clients) >= _CLIENT_LIMIT:
                del _clients[next(iter(_clients))]
            client = _clients[devices] = xla_client.make_cpu_client(asynchronous=True, num_devices=devices)
        return client


def release_clients() -> None:
    """Let go of the clients that are kept, with their threads; the next compilation makes one again (milliseconds)."""
    with _clients_lock:
        if not _clients:
            return
        _clients.clear()
    gc.collect()  # a client is part of a cycle


def compile_program(
    artifact: bytes, options: bytes, replicas: int, partitions: int, ask: Ask = nobody
) -> tuple[dict[str, Any], bytes]:
    """Compile a StableHLO portable artifact for ``replicas x partitions`` devices; ``ask`` brings questions to the
    controller (see `worker.partitioning`).

    Returns:
      (metadata, serialized executable).  The metadata is plain data: name, inputs and outputs as [shape, dtype kind],
      shardings as serialized `xla.OpSharding`, layouts as text, memory kinds, donated inputs, cost and memory.

    Raises:
      statuses.StatusError: INVALID_ARGUMENT for a program that cannot be read; what XLA said otherwise.
    """
    devices = replicas * partitions
    client = _client(devices)
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        try:
            module = stablehlo.deserialize_portable_artifact(context, artifact)
        except Exception as error:
            raise statuses.invalid_argument(
                f"the program is not a StableHLO artifact that the workers' jaxlib {JAXLIB_VERSION} reads: {error}"
            ).error() from None
        metadata = _signature(module)
        parsed = xla_client.CompileOptions.ParseFromString(options)
        local = sorted(client.local_devices(), key=lambda d: d.id)
        ids = np.array([d.id for d in local], dtype=np.int32).reshape(replicas, partitions)
        parsed.device_assignment = xla_client.DeviceAssignment.create(ids)
        with Questions(ask) if compiler_callbacks.may_ask(artifact) else contextlib.nullcontext() as questions:
            if questions is not None:
                questions.redirect(module)
            try:
                executable = client.compile_and_load(module, _jax.DeviceList(tuple(local)), parsed)
            except Exception as error:
                if questions is not None and questions.failure is not None:
                    text = f"Python that was called while the program was partitioned: {questions.failure}"
                    raise Status(Code.UNKNOWN, statuses.without_retried_words(text)).error() from None
                raise statuses.classify_runtime_error(str(error)).error() from None
    metadata.update(_describe(executable))
    return metadata, client.serialize_executable(executable)


def program_text(serialized: bytes, options: bytes, replicas: int, partitions: int) -> str:
    """The optimized HLO text of a compiled program.

    Raises:
      statuses.StatusError: XLA cannot load it.
    """
    client = _client(replicas * partitions)
    local = sorted(client.local_devices(), key=lambda d: d.id)
    parsed = xla_client.CompileOptions.ParseFromString(options)
    ids = np.array([d.id for d in local], dtype=np.int32).reshape(replicas, partitions)
    parsed.device_assignment = xla_client.DeviceAssignment.create(ids)
    try:
        executable = client.deserialize_executable(serialized, _jax.DeviceList(tuple(local)), parsed)
        return "\n\n".join(module.to_string() for module in executable.hlo_modules())
    except Exception as error:
        raise statuses.classify_runtime_error(str(error)).error() from None


def _signature(module: Any) -> dict[str, Any]:
    attributes = module.operation.attributes
    name = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "main"
    main = next(
        (
            op
            for op in module.body.operations
            if "sym_name" in op.attributes and ir.StringAttr(op.attributes["sym_name"]).value == "main"
        ),
        None,
    )
    if main is None:
        raise statuses.invalid_argument(f"the program {name!r} has no function 'main'").error()
    _replace_tokens(main)
    function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    donated = []
    if "arg_attrs" in main.attributes:
        for index, argument in enumerate(ir.ArrayAttr(main.attributes["arg_attrs"])):
            names = ir.DictAttr(argument)
            if "tf.aliasing_output" in names or "jax.buffer_donor" in names:
                donated.append(index)
    return {
        "name": name,
        "inputs": [_array_type(t) for t in function.inputs],
        "outputs": [_array_type(t) for t in function.results],
        "donated": donated,
    }


def _replace_tokens(main: Any) -> None:
    """Make token arguments and results of a program with ordered effects empty arrays, which is what jax passes for
    them: a token has no place in an array that is moved, kept or sent.  The order stays: an execution waits for its
    arguments, and its results are there when all of it is done."""
    empty = ir.RankedTensorType.get([0], ir.IntegerType.get_signless(1))

    def without_tokens(kinds: list[Any]) -> list[Any]:
        return [empty if _is_token(kind) else kind for kind in kinds]

    function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    if not any(_is_token(kind) for kind in [*function.inputs, *function.results]):
        return
    [block] = main.regions[0].blocks
    for argument in block.arguments:
        if _is_token(argument.type):
            with ir.InsertionPoint.at_block_begin(block):
                token = stablehlo.after_all([])
            argument.replace_all_uses_with(token)
            argument.set_type(empty)
    terminator = block.operations[len(block.operations) - 1]
    for index, value in enumerate(terminator.operands):
        if _is_token(value.type):
            with ir.InsertionPoint(terminator):
                terminator.operands[index] = stablehlo.constant(
                    ir.DenseElementsAttr.get(np.zeros(0, np.bool_), type=empty)
                )
    for name, kinds in (("arg_attrs", function.inputs), ("res_attrs", function.results)):
        if name in main.attributes:
            # A sharding of a token fits no array.
            main.attributes[name] = ir.ArrayAttr.get([
                ir.DictAttr.get({}) if _is_token(kind) else attributes
                for kind, attributes in zip(kinds, ir.ArrayAttr(main.attributes[name]), strict=True)
            ])
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(without_tokens(function.inputs), without_tokens(function.results))
    )


def _is_token(kind: Any) -> bool:
    return str(kind) == "!stablehlo.token"


def _array_type(kind: Any) -> list[Any]:
    try:
        tensor = ir.RankedTensorType(kind)
    except ValueError:
        raise statuses.unimplemented(f"a program with an argument or result of type {kind}").error() from None
    return [list(tensor.shape), dtypes.kind_of_mlir(str(tensor.element_type))]


def _describe(executable: Any) -> dict[str, Any]:
    parameters, results = executable.get_parameter_shardings(), executable.get_output_shardings()
    stats = executable.get_compiled_memory_stats()
    kinds = executable.get_output_memory_kinds()
    return {
        "parameter_shardings": None if parameters is None else [s.SerializeToString() for s in parameters],
        "output_shardings": None if results is None else [s.SerializeToString() for s in results],
        "parameter_layouts": [str(layout) for layout in executable.get_parameter_layouts()],
        "output_layouts": [str(layout) for layout in executable.get_output_layouts()],
        "output_memory_kinds": list(kinds[0]) if kinds else [],
        "generated_code_bytes": executable.size_of_generated_code_in_bytes(),
        "memory_stats": {name: int(getattr(stats, name, 0)) for name in _MEMORY_STATS},
        "cost_analysis": {name: float(value) for name, value in dict(executable.cost_analysis()).items()},
        "fingerprint": bytes(executable.fingerprint or b""),
    }


def environment_fingerprint() -> str:
    """What of this process's environment changes compiled code, beside the jaxlib version: the CPU that it is compiled
    for, and XLA's flags."""
    return f"{cpu_identity()} {os.environ.get('XLA_FLAGS', '')}".rstrip()
