"""Prometheus metrics of a cluster, fed from its events."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ridgeway.timeline.stream import Moment

#: Upper bounds of the recovery histogram, seconds: from a warm standby to a relaunch with a long compilation.
RECOVERY_BUCKETS_SECONDS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, 120, 300, 600)


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
        self._open: set[str] = set()
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
            case "compiled":
                cache = "hit" if moment.text("cache") == "hit" else "miss"
                self._compiled.labels(cache).inc()
                self._compile_seconds.labels(cache).inc(moment.seconds("seconds") or 0.0)

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
