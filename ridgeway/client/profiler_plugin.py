"""Makes the cluster a part of what `jax.profiler` records in the user's process.

jaxlib's profiler asks every *plugin profiler* that is registered to record too, and adds what it gives to its own
trace.  A plugin is described by C structures (XLA's ``profiler_c_api.h``, as the PJRT profiler extension holds them);
they are made here with `ctypes`, and their functions talk to the server (`protocol.profile_link`).  Whatever fails
here leaves the user's own trace as it would be without a cluster; it is logged.
"""

import contextlib
import ctypes
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxlib import _profiler  # pyright: ignore[reportAttributeAccessIssue]  # jaxlib ships no types

from ridgeway.protocol import callback_link, profile_link

CONNECT_SECONDS = 10.0
FETCH_SECONDS = 300.0
LIMIT_BYTES = 2**31 - 1
"""protobuf's own, of a message."""

_log = logging.getLogger(__name__)
_Pointer = ctypes.c_void_p
_Size = ctypes.c_size_t
_Function = ctypes.CFUNCTYPE(_Pointer, _Pointer)
"""Takes a pointer to its arguments, returns an error or null; ours never return an error."""


class _CreateArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size), ("options", _Pointer), ("options_size", _Size), ("profiler", _Pointer),
    ]  # fmt: skip


class _ProfilerArguments(ctypes.Structure):
    """Of destroy, start and stop."""

    _fields_ = [("struct_size", _Size), ("profiler", _Pointer)]


class _CollectArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", _Size), ("profiler", _Pointer), ("buffer", _Pointer), ("buffer_size_in_bytes", _Size),
    ]  # fmt: skip


class _Api(ctypes.Structure):
    """``PLUGIN_Profiler_Api`` in its first version: later ones have more at the end, and accept this one."""

    _fields_ = [
        ("struct_size", _Size), ("priv", _Pointer),
        *((name, _Function) for name in (
            "error_destroy", "error_message", "error_get_code", "create", "destroy", "start", "stop", "collect_data",
        )),
    ]  # fmt: skip


class _Extension(ctypes.Structure):
    """``PJRT_Profiler_Extension``."""

    _fields_ = [
        ("struct_size", _Size), ("type", ctypes.c_int), ("next", _Pointer), ("profiler_api", ctypes.POINTER(_Api)),
        ("traceme_context_id", ctypes.c_int64),
    ]  # fmt: skip


class _PjrtApi(ctypes.Structure):
    """The beginning of ``PJRT_Api``, all that is looked at."""

    _fields_ = [("struct_size", _Size), ("extension_start", ctypes.POINTER(_Extension))]


_PROFILER_EXTENSION = 1
"""``PJRT_Extension_Type_Profiler``"""
_CAPSULE_NAME = b"pjrt_c_api"


class ClusterRecorder:
    """One recording, over a stream to the server."""

    def __init__(self, address: str, options: profile_link.Options):
        self._address = address
        self._options = options
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: Any = None
        self._channel: Any = None
        self._data = b""
        self.problems: list[str] = []

    def start(self) -> None:
        """Have the cluster record.

        Raises:
          Exception: it does not.
        """
        import grpc  # here, since it is not needed before there is a profile

        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(self._address, options)
        call = self._channel.stream_stream(profile_link.PATH)
        grpc.channel_ready_future(self._channel).result(CONNECT_SECONDS)
        self._outgoing.put(callback_link.pack(["start", self._options.to_fields()]))
        self._answers = call(iter(self._outgoing.get, None))
        with self._at_most(CONNECT_SECONDS):
            answer = callback_link.unpack(next(self._answers))
        if answer[0] != "started":
            raise RuntimeError(str(answer[-1]))

    def stop(self) -> None:
        """Fetch what was recorded.

        Raises:
          Exception: it does not come.
        """
        self._outgoing.put(callback_link.pack(["stop"]))
        collector = profile_link.Collector(LIMIT_BYTES)
        with self._at_most(FETCH_SECONDS):
            for data in self._answers:
                collector.add(callback_link.unpack(data))
        if not collector.ended:
            raise RuntimeError("the server stopped in the middle")
        self.problems = collector.problems
        self._data = profile_link.together(collector.traces())

    @contextlib.contextmanager
    def _at_most(self, seconds: float) -> Iterator[None]:
        """After so long what is waited for is cancelled, which raises there."""
        timer = threading.Timer(seconds, self._answers.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Disconnect; the cluster stops recording if it still does."""
        self._outgoing.put(None)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def data(self) -> bytes:
        """A serialized XSpace; empty if nothing was recorded."""
        return self._data


class ProfilerPlugin:
    """The functions that jaxlib calls, from any thread and in this order: create, start, stop, collect_data,
    destroy."""

    def __init__(self, address: Callable[[], str]):
        self._address = address
        self._numbers = itertools.count(1)
        self._recorders: dict[int, ClusterRecorder] = {}
        self._buffers: dict[int, Any] = {}
        functions = {
            name: _Function(function)
            for name, function in (
                ("error_destroy", self._nothing), ("error_message", self._nothing), ("error_get_code", self._nothing),
                ("create", self._create), ("destroy", self._destroy), ("start", self._start), ("stop", self._stop),
                ("collect_data", self._collect),
            )
        }  # fmt: skip
        self._api = _Api(struct_size=ctypes.sizeof(_Api), **functions)
        self._extension = _Extension(
            struct_size=ctypes.sizeof(_Extension), type=_PROFILER_EXTENSION, profiler_api=ctypes.pointer(self._api)
        )
        self._pjrt_api = _PjrtApi(
            struct_size=ctypes.sizeof(_PjrtApi), extension_start=ctypes.pointer(self._extension)
        )

    def capsule(self) -> Any:
        """What ``register_plugin_profiler`` takes; this object must live as long as the process."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [_Pointer, ctypes.c_char_p, _Pointer]
        return new(ctypes.addressof(self._pjrt_api), _CAPSULE_NAME, None)

    def _nothing(self, pointer: int) -> None:
        return None

    def _create(self, pointer: int) -> None:
        arguments = _CreateArguments.from_address(pointer)
        arguments.profiler = None
        try:
            text = ctypes.string_at(arguments.options, arguments.options_size) if arguments.options_size else b""
            number = next(self._numbers)
            self._recorders[number] = ClusterRecorder(self._address(), _options(text))
            arguments.profiler = number
        except Exception as error:
            _log.warning("the cluster takes no part in this profile: %s", error)

    def _destroy(self, pointer: int) -> None:
        number = _ProfilerArguments.from_address(pointer).profiler
        self._buffers.pop(number, None)
        recorder = self._recorders.pop(number, None)
        if recorder is not None:
            recorder.close()

    def _start(self, pointer: int) -> None:
        number = _ProfilerArguments.from_address(pointer).profiler
        recorder = self._recorders.get(number)
        try:
            if recorder is not None:
                recorder.start()
        except Exception as error:
            self._recorders.pop(number).close()
            _log.warning("the cluster takes no part in this profile: %s", error)

    def _stop(self, pointer: int) -> None:
        recorder = self._recorders.get(_ProfilerArguments.from_address(pointer).profiler)
        try:
            if recorder is not None:
                recorder.stop()
                for problem in recorder.problems:
                    _log.warning("profile of the cluster: %s", problem)
        except Exception as error:
            _log.warning("the cluster's part of this profile is lost: %s", error)

    def _collect(self, pointer: int) -> None:
        arguments = _CollectArguments.from_address(pointer)
        recorder = self._recorders.get(arguments.profiler)
        data = b"" if recorder is None else recorder.data
        if data:
            # Read by the caller before the profiler is destroyed.
            buffer = self._buffers[arguments.profiler] = ctypes.create_string_buffer(data, len(data))
            arguments.buffer = ctypes.addressof(buffer)
        arguments.buffer_size_in_bytes = len(data)


def _options(serialized: bytes) -> profile_link.Options:
    from ridgeway.protocol import messages  # here, since it reads jaxlib's library

    options = messages.ProfileOptions.FromString(serialized)
    # By default jax records Python too; the workers' Python is not the user's.
    return profile_link.Options(options.host_tracer_level, 0, options.duration_ms / 1000)


def _address() -> str:
    return jax.config.read("jax_backend_target").rpartition("://")[2]


_plugin: ProfilerPlugin | None = None


def install() -> None:
    """Register the plugin, once in a process."""
    global _plugin
    if _plugin is None:
        _plugin = ProfilerPlugin(_address)
        _profiler.register_plugin_profiler(_plugin.capsule())
