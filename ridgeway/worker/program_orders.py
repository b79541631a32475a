"""Orders about programs: load, unload, execute."""

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ridgeway.protocol.status import Code, Status
from ridgeway.worker import buffers, device_runtime, program_source
from ridgeway.worker.device_runtime import LoadedProgram, Runtime
from ridgeway.worker.promises import Ended

if TYPE_CHECKING:
    from ridgeway.worker.executor import Executor


class ProgramOrders:
    """Handlers by order name, for one executor."""

    def __init__(self, executor: "Executor"):
        self._executor = executor
        self._store = executor.store
        self.sources: dict[str, program_source.ProgramSource] = {}
        self.handlers: dict[str, Callable[..., None]] = {
            "load": self.load, "unload": self.unload, "preload": self.preload,
            "execute": self.execute, "execute_and_tell": self.execute_and_tell,
        }  # fmt: skip

    def load(self, *fields: Any, attached: list[bytearray]) -> None:
        """Keep a program; it is loaded into a runtime when it is first executed there."""
        source = program_source.from_fields(list(fields), bytes(attached[0]))
        self.sources[source.program] = source

    def unload(self, programs: list[str], attached: list[bytearray]) -> None:
        """Forget programs."""
        for program in programs:
            self.sources.pop(program, None)
            self._executor.runtime.programs.pop(program, None)

    def preload(self, programs: list[str], attached: list[bytearray]) -> None:
        """Load programs into the present runtime beside whatever comes next."""
        runtime = self._executor.runtime
        sources = [source for program in programs if (source := self.sources.get(program)) is not None]

        def work() -> None:
            for source in sources:
                if runtime.aborted is not None or not runtime.has_devices(source.devices):
                    return
                self._executor.running.begin(source.program, source.name)
                try:
                    self._loaded(source, runtime)
                except Exception as error:  # whoever executes it gets the same error as a value
                    print(f"preloading {source.name}: {str(error)[:200]}", flush=True)
                finally:
                    self._executor.running.end()

        threading.Thread(target=work, name="preload", daemon=True).start()

    def execute_and_tell(self, request: int, *fields: Any, attached: list[bytearray]) -> None:
        """`execute`, and answer when it is complete."""
        self.execute(*fields, attached=attached, request=request)

    def execute(
        self, execution: int, program: str, arguments: list[Any], results: list[int], kept: list[int],
        attached: list[bytearray], request: int | None = None,
    ) -> None:  # fmt: skip
        """Start an execution. An argument is a group, or a list of (device, group) pairs; those in ``kept`` are not
        donated even if the program would."""
        executor = self._executor
        runtime = executor.runtime
        source = self.sources[program]
        local = tuple(d for d in source.devices if d in runtime.local)
        spans = len(source.devices) > len(local)
        executor.running.begin(program, source.name)
        try:
            if runtime.aborted is not None and spans:
                raise runtime.aborted.error()
            if not runtime.has_devices(source.devices):
                raise executor.not_entered(source.name).error()
            if spans:
                executor.wait_for_agreement(runtime)
            loaded = self._loaded(source, runtime)
            ended = executor.ended(runtime, spans)
            arrays = [self._argument(a, i, loaded, runtime, ended) for i, a in enumerate(arguments)]
            for index in kept:
                shards = device_runtime.shards_of(arrays[index])
                copies = [
                    runtime.copy(shard, device, device_runtime.memory_kind_of(shard))
                    for shard, device in zip(shards, loaded.local, strict=True)
                ]
                arrays[index] = loaded.assemble(index, copies)
            tainted = spans or any(self._store.spans(a) for a in arguments if type(a) is int)
            token, outputs = loaded.execute(arrays)
        except Exception as error:
            executor.running.end()
            status = executor.describe(error, runtime)
            if status.code is Code.INTERNAL:
                traceback.print_exc()
            for result in results:
                self._store.poison(result, local, status)
            if spans and runtime.generation > 0:
                executor.agreement.refused(execution)
            executor.execution_failed(execution, status, runtime)
            if request is not None:
                executor.reply_error(request, status, runtime)
            return
        for result, output, kind in zip(results, outputs, source.output_memory_kinds, strict=True):
            self._store.set(result, buffers.result_group(output, loaded.local, runtime, tainted, kind))
        answer = None if request is None else executor.answer(request, runtime)
        agreement = executor.agreement

        def complete(_: Any, error: Status | None) -> None:
            executor.running.end()
            if error is not None:
                if runtime.generation > 0 and runtime.aborted is None:
                    agreement.failed(execution, spans)
                executor.execution_failed(execution, error, runtime)
            if answer is not None:
                answer(None, error)

        executor.waiters.execution(token, complete, tainted, bool(source.callbacks))

    def _loaded(self, source: program_source.ProgramSource, runtime: Runtime) -> LoadedProgram:
        loaded = runtime.programs.get(source.program)
        if loaded is None:
            spans = any(device not in runtime.local for device in source.devices)
            callbacks = [
                self._executor.callbacks.function(number, results, spans) for number, results in source.callbacks
            ]
            loaded = runtime.load(source, callbacks)
        return loaded

    def _argument(
        self, argument: Any, index: int, loaded: LoadedProgram, runtime: Runtime, ended: Ended
    ) -> Any:
        if type(argument) is int:
            return self._store.argument(argument, index, loaded, runtime, ended)
        group_of = dict(argument)
        return loaded.assemble(index, [self._store.shard(group_of[d], d, runtime, ended) for d in loaded.local])
