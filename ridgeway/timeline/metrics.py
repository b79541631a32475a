"""Prometheus metrics of a cluster, fed from its events."""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ridgeway.proxy.session_account import CATEGORIES
from ridgeway.timeline.stream import Moment, SessionName, clock_value

#: Upper bounds of the recovery histogram, seconds: from a warm standby to a relaunch with a long compilation.
RECOVERY_BUCKETS_SECONDS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, 120, 300, 600)

#: Sessions that are over and whose gauges are still shown, so that they are seen once more at least.
ENDED_SESSIONS_SHOWN = 20


class Metrics:
    """Counts what happens. `EventLog.subscribe(metrics.observe)` feeds it.

    It has a registry of its own, so that several clusters in one process do not mix and the program's metrics
    stay the program's.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.port: int | None = None
        """Where `serve` listens."""
        own = {"namespace": "ridgeway", "registry": self.registry}
        self._losses = Counter("losses", "Hosts and executors lost", ["slice", "code"], **own)
        self._recoveries = Counter("recoveries", "Sessions that stepped again after a loss", **own)
        self._recovery_seconds = Histogram(
            "recovery_seconds", "From the loss to the next step", buckets=RECOVERY_BUCKETS_SECONDS, **own
        )
        self._generations = Counter("generations", "Generations made and aborted", ["outcome"], **own)
        self._sessions_started = Counter("sessions_started", "Clients that connected", **own)
        self._sessions = Gauge("sessions", "Clients connected now", **own)
        self._compiled = Counter("compiled_programs", "Compile requests by cache outcome", ["cache"], **own)
        self._compile_seconds = Counter("compile_seconds", "Seconds spent on compile requests", ["cache"], **own)
        self._session_seconds = Gauge(
            "session_seconds", "What a session's time was spent on so far", ["session", "category"], **own
        )
        self._session_undecided = Gauge(
            "session_undecided_seconds", "Time of a session that is not told apart yet", ["session"], **own
        )
        self._session_steps = Gauge("session_steps", "Steps of a session, repeated ones included", ["session"], **own)
        self._session_repeated = Gauge(
            "session_repeated_steps", "Steps done again because a loss had undone them", ["session"], **own
        )
        self._session_bytes = Gauge("session_array_bytes", "Arrays that a session has on workers", ["session"], **own)
        self._executors = Gauge("executors", "Executors that are ready", **own)
        self._slices_up = Gauge("slices_up", "Slices with all their hosts ready", **own)
        self._open: set[str] = set()
        self._ended: deque[SessionName] = deque()
        self._alive: set[tuple[int | None, int | None]] = set()
        self._up: set[int | None] = set()
        # A series that exists from the start makes a rate over its first increase right.
        for outcome in ("ready", "aborted"):
            self._generations.labels(outcome)
        for cache in ("hit", "miss"):
            self._compiled.labels(cache)
            self._compile_seconds.labels(cache)

    def observe(self, event: Mapping[str, Any]) -> None:
        """Take one event in. Kinds that no metric is about are passed over."""
        moment = Moment(0, str(event.get("kind")), 0.0, event)
        match moment.kind:
            case "host_lost":
                slice_index = moment.integer("slice")
                self._losses.labels("" if slice_index is None else slice_index, moment.text("code")).inc()
                self._alive.discard(moment.host)
                self._executors.set(len(self._alive))
            case "recovery_completed":
                self._recoveries.inc()
                seconds = moment.seconds("seconds")
                if seconds is not None:
                    self._recovery_seconds.observe(seconds)
            case "generation_ready":
                self._generations.labels("ready").inc()
            case "generation_aborted":
                self._generations.labels("aborted").inc()
            case "session_started":
                self._sessions_started.inc()
                self._open.add(repr(moment.session))
                self._sessions.set(len(self._open))
            case "session_ended":
                self._open.discard(repr(moment.session))
                self._sessions.set(len(self._open))
                self._forget_later(moment.session)
            case "goodput" if moment.session is not None:
                self._account(str(moment.session), moment)
            case "host_ready":
                self._alive.add(moment.host)
                self._executors.set(len(self._alive))
            case "slice_ready":
                self._up.add(moment.integer("slice"))
                self._slices_up.set(len(self._up))
            case "slice_lost":
                self._up.discard(moment.integer("slice"))
                self._slices_up.set(len(self._up))
            case "compiled":
                cache = "hit" if moment.text("cache") == "hit" else "miss"
                self._compiled.labels(cache).inc()
                self._compile_seconds.labels(cache).inc(moment.seconds("seconds") or 0.0)

    def _account(self, session: str, moment: Moment) -> None:
        told = moment.fields.get("seconds")
        seconds = told if isinstance(told, Mapping) else {}
        for category in CATEGORIES:
            self._session_seconds.labels(session, category).set(clock_value(seconds.get(category)) or 0.0)
        self._session_undecided.labels(session).set(moment.seconds("undecided_seconds") or 0.0)
        self._session_steps.labels(session).set(moment.integer("steps") or 0)
        self._session_repeated.labels(session).set(moment.integer("repeated_steps") or 0)
        self._session_bytes.labels(session).set(moment.integer("array_bytes") or 0)

    def _forget_later(self, session: SessionName | None) -> None:
        if session is None:
            return
        self._session_bytes.labels(str(session)).set(0)
        self._ended.append(session)
        if len(self._ended) > ENDED_SESSIONS_SHOWN:
            oldest = str(self._ended.popleft())
            labels = [(self._session_seconds, (oldest, category)) for category in CATEGORIES]
            labels += [
                (gauge, (oldest,))
                for gauge in (
                    self._session_undecided, self._session_steps, self._session_repeated, self._session_bytes,
                )
            ]  # fmt: skip
            for gauge, values in labels:
                with contextlib.suppress(KeyError):  # it never had an account
                    gauge.remove(*values)

    def serve(self, port: int, address: str = "127.0.0.1") -> Callable[[], None]:
        """Answer Prometheus at `http://address:port/metrics` from a thread. Port 0 picks a free one.

        Returns:
          A function that stops it and frees the port.

        Raises:
          OSError: the address cannot be listened on.
        """
        server, thread = start_http_server(port, addr=address, registry=self.registry)
        self.port = server.server_port

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
