"""The head: resource manager and proxy server in one process, ``python -m ridgeway.proxy.head``."""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeway import processes
from ridgeway import settings as runtime_settings
from ridgeway.cluster.connections import Connections
from ridgeway.cluster.control import Control
from ridgeway.cluster.rendezvous import Rendezvous, RendezvousError
from ridgeway.cluster.resource_manager import TICK_SECONDS, ResourceManager
from ridgeway.cluster.topology import Topology
from ridgeway.proxy import array_requests, cluster_requests, executable_requests
from ridgeway.proxy.compile_cache import CompileCache
from ridgeway.proxy.programs import Programs
from ridgeway.proxy.server import ProxyServer
from ridgeway.proxy.services import Services
from ridgeway.timeline.events import EventLog
from ridgeway.worker.process_identity import hello_versions

SECRET_VARIABLE = "RIDGEWAY_CLUSTER_SECRET"
STOP_GRACE_SECONDS = 0.5


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The head's command line; see ``--help``."""
    parser = argparse.ArgumentParser(prog="ridgeway head", description="Resource manager and IFRT proxy server.")
    parser.add_argument("--name", default="ridgeway")
    parser.add_argument("--slices", type=int, required=True)
    parser.add_argument("--hosts-per-slice", type=int, required=True)
    parser.add_argument("--devices-per-host", type=int, required=True)
    parser.add_argument("--cluster-host", default="127.0.0.1", help="address that workers connect to")
    parser.add_argument("--cluster-port", type=int, default=29001)
    parser.add_argument(
        "--proxy-host", default="127.0.0.1", help="address that the JAX program connects to; it has no authentication"
    )
    parser.add_argument("--proxy-port", type=int, default=29000)
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address that Prometheus connects to")
    parser.add_argument("--metrics-port", type=int, default=None, help="serve Prometheus metrics; 0: any free port")
    parser.add_argument("--events", type=Path, default=None, help="file to append events to")
    parser.add_argument("--cache-folder", type=Path, default=None, help="persistent compile cache")
    parser.add_argument(
        "--scratch-folder", default="", help="where the state of preempted workers waits; all workers share it"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of ridgeway/settings.py"
    )
    return parser.parse_args(arguments)


class Head:
    """Composition of all the parts of a head."""

    def __init__(self, options: argparse.Namespace, secret: str):
        overrides = dict(item.partition("=")[::2] for item in options.set)
        self.settings = runtime_settings.load_settings(overrides)
        self.topology = Topology(options.slices, options.hosts_per_slice, options.devices_per_host)
        self.options = options
        self.events = EventLog(options.events, self.settings.event_limit)
        self.versions = hello_versions()
        self.rendezvous = Rendezvous(options.cluster_host, self.settings.spare_rendezvous_services)
        self.manager = ResourceManager(
            self.topology, self.settings, self.events.emit, self.rendezvous, options.cluster_host,
            scratch_folder=options.scratch_folder,
        )  # fmt: skip
        platform = f"cpu jaxlib {self.versions['jaxlib']} ridgeway {self.versions['ridgeway']} {os.uname().machine}"
        cache = CompileCache(options.cache_folder, self.settings.compile_cache_limit_bytes)
        self.programs = Programs(self.manager, cache, platform, self.events.emit)
        self.services = Services(
            self.manager, self.programs, self.settings, self.events.emit, self.events.subscribe, self.versions
        )
        self.events.subscribe(self.services.observer.on_event)
        for module in (array_requests, executable_requests, cluster_requests):
            self.services.handlers.update(module.HANDLERS)
        self.proxy = ProxyServer(self.services)
        self.control = Control(self.manager, self.events, self.describe, self.stop)
        self.connections = Connections(self.manager, secret, options.name, self.versions, self.control.serve)
        self.proxy_address = ""
        self.metrics_address: str | None = None
        self.started = time.monotonic()
        self._stopping = asyncio.Event()
        self.stop_reason = ""

    def describe(self) -> dict[str, Any]:
        """The proxy's part of a status."""
        cache = self.programs.cache
        return {
            "name": self.options.name,
            "proxy_address": self.proxy_address,
            "metrics_address": self.metrics_address,
            "uptime_seconds": round(time.monotonic() - self.started, 1),
            "sessions": [
                {"session": s.number, "client": s.client, "arrays": len(s.arrays), "executables": len(s.executables),
                 "bytes": s.bytes_described, "array_bytes": s.array_bytes,
                 "age_seconds": round(time.monotonic() - s.started, 1), "goodput": self.services.observer.account(s)}
                for s in self.services.sessions.values()
            ],
            "head": {"pid": os.getpid(), "memory_bytes": processes.memory_bytes(os.getpid())},
            "compile_cache": {"hits": cache.hits, "misses": cache.misses, "problem": cache.problem,
                              "folder": None if cache.folder is None else str(cache.folder),
                              "bytes": cache.kept_bytes, "limit_bytes": self.settings.compile_cache_limit_bytes},
        }  # fmt: skip

    def stop(self, reason: str) -> None:
        """End `run`."""
        if not self.stop_reason:
            self.stop_reason = reason
            self.events.emit("cluster_stopping", reason=reason)
            self.manager.stopping = True
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
          OSError: a port cannot be used.
          RendezvousError: the rendezvous process did not start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, f"signal {number}")
        # Ports first: the mistake that people make should be told at once.
        cluster_host, cluster_port = await self.connections.start(self.options.cluster_host, self.options.cluster_port)
        proxy_port = await self.proxy.start(self.options.proxy_host, self.options.proxy_port)
        stop_metrics = self._serve_metrics()
        await self.rendezvous.start()
        self.proxy_address = f"{self.options.proxy_host}:{proxy_port}"
        self.events.emit("cluster_started", topology=str(self.topology), name=self.options.name)
        print(
            f"READY cluster={cluster_host}:{cluster_port} proxy={self.proxy_address} metrics={self.metrics_address}",
            flush=True,
        )
        tasks = [asyncio.create_task(self._ticks()), asyncio.create_task(self.proxy.run_ticks())]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stopped:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            for agent in self.manager.agents.values():
                agent.send(["stop", self.stop_reason])
            await self.proxy.stop(STOP_GRACE_SECONDS)
            await self.connections.stop()
            await self.rendezvous.stop()
            self.events.emit("cluster_stopped", reason=self.stop_reason)
            stop_metrics()
            self.events.close()

    def _serve_metrics(self) -> Callable[[], None]:
        """Serve Prometheus, if asked to; returns what ends that.

        Raises:
          OSError: the port cannot be used.
        """
        port, host = self.options.metrics_port, self.options.metrics_host
        if port is None:
            return lambda: None
        # Not needed otherwise, and it takes its time to import.
        from ridgeway.timeline.metrics import Metrics

        metrics = Metrics()
        try:
            stop = metrics.serve(port, host)
        except OSError as error:
            raise OSError(f"--metrics-port {port} cannot be used on {host}: {error.strerror or error}") from None
        self.events.subscribe(metrics.observe)
        self.metrics_address = f"{host}:{metrics.port}"
        return stop

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.manager.tick()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    secret = os.environ.pop(SECRET_VARIABLE, "")
    if not secret:
        problem = f"set {SECRET_VARIABLE} to the cluster's secret (the same on every worker)"
        print(f"ridgeway head: {problem}", file=sys.stderr)
        return 2
    processes.never_fail_at_output()
    processes.raise_descriptor_limit()
    try:
        asyncio.run(_run(options, secret))
    except (OSError, RendezvousError, ValueError) as error:
        print(f"ridgeway head: {_explain(error, options)}", file=sys.stderr)
        return 2
    return 0


async def _run(options: argparse.Namespace, secret: str) -> None:
    await Head(options, secret).run()
    # Everything is closed. asyncio would now wait for grpc's own tasks, which may never end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _explain(error: Exception, options: argparse.Namespace) -> str:
    text = str(error)
    if text.startswith("--"):
        return text
    if "in use" in text.lower() or "address already" in text.lower():
        return (
            f"port {options.cluster_port} or {options.proxy_port} is in use ({text}); stop what uses it, "
            "or choose others with --cluster-port and --proxy-port (0: any free one)"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
