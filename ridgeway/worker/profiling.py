"""What an executor records of itself when the head asks for a profile: jaxlib's own profiler, between two messages."""

import threading
import time
from collections.abc import Callable
from typing import Any

from ridgeway.protocol.profile_link import Options
from ridgeway.settings import Settings
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import device_runtime


class Profiling:
    """Records on a thread of its own: nothing of it stands in the sequence of orders, which may be stuck."""

    def __init__(self, settings: Settings, send: Callable[[list[Any], list[bytes]], None]):
        self._settings = settings
        self._send = send
        self._stops: dict[int, threading.Event] = {}
        self._recording: set[int] = set()

    def start(self, number: int, options: list[Any], attached: list[bytearray]) -> None:
        """Record profile ``number`` from now on."""
        stop = self._stops[number] = threading.Event()
        self._recording.add(number)
        arguments = (number, Options.from_fields(options), stop)
        threading.Thread(target=self._record, args=arguments, name="profile", daemon=True).start()

    def stop(self, number: int, attached: list[bytearray]) -> None:
        """Send what was recorded."""
        stop = self._stops.pop(number, None)
        if stop is not None:
            stop.set()

    def tie(self) -> str | None:
        """What of it binds this process, for `renewal`."""
        return "a profile is being recorded" if self._recording else None

    def _record(self, number: int, options: Options, stop: threading.Event) -> None:
        start, data, problem = time.time_ns(), b"", ""
        try:
            session = device_runtime.start_profile(options.host_tracer_level, options.python_tracer_level)
            limit = self._settings.profile_limit_seconds
            wanted = min(options.seconds or limit, limit)
            if not stop.wait(wanted) and wanted == limit:
                problem = f"only the first {limit} s were recorded (profile_limit_seconds)"
            data = session.stop()
        except Exception as error:
            problem = f"its profiler failed: {str(error)[:300]}"
        if len(data) > self._settings.profile_limit_bytes:
            problem = f"its {len(data)} bytes are more than {self._settings.profile_limit_bytes} (profile_limit_bytes)"
            data = b""
        stop.wait()  # what ended by itself is kept until the head asks, or is gone and this process with it
        try:
            self._send(["profile_data", number, start, problem], [data])
        except LinkClosed:
            pass
        self._recording.discard(number)
