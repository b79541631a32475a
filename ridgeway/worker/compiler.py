"""The compiler: a process that compiles programs for the head, so that neither an executor's orders nor its data
are touched by a compilation, or by one that crashes XLA."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ridgeway.protocol.status import StatusError, internal
from ridgeway.transport import authentication, blocking_link
from ridgeway.transport.stream_link import LinkClosed
from ridgeway.worker import compilation
from ridgeway.worker.executor import EXIT_HEAD_GONE, EXIT_REFUSED
from ridgeway.worker.process_identity import hello_versions

PARALLEL_COMPILATIONS = 2


def main(arguments: dict[str, Any]) -> int:
    """Entry of the forked process; ``arguments`` as an agent's template gives them."""
    timeout = arguments["settings"]["executor_start_timeout_seconds"]
    try:
        link = blocking_link.connect(arguments["head_host"], arguments["head_port"], arguments["secret"], timeout)
        link.send(["hello", {
            "role": "compiler", "agent": arguments["agent"], "compiler": arguments["compiler"], "pid": os.getpid(),
            "versions": hello_versions(), "environment": compilation.environment_fingerprint(),
            "head": arguments["head"],
        }])  # fmt: skip
        link.set_timeout(timeout)
        answer, _ = link.receive()
        link.set_timeout(None)
    except (OSError, LinkClosed, authentication.AuthenticationError) as error:
        print(f"compiler {arguments['compiler']}: {error}", flush=True)
        return EXIT_HEAD_GONE
    if answer[0] != "welcome":
        print(f"compiler {arguments['compiler']}: refused: {answer[-1]}", flush=True)
        return EXIT_REFUSED
    interval = arguments["settings"]["heartbeat_interval_seconds"]
    threading.Thread(target=_heartbeats, args=(link, interval), name="heartbeats", daemon=True).start()
    pool = ThreadPoolExecutor(PARALLEL_COMPILATIONS, thread_name_prefix="compile")
    try:
        while True:
            message, attached = link.receive()
            pool.submit(_work, link, message, attached)
    except LinkClosed:
        return EXIT_HEAD_GONE


def _heartbeats(link: blocking_link.BlockingLink, interval_seconds: float) -> None:
    pause = threading.Event()
    try:
        while not pause.wait(interval_seconds):
            link.send(["heartbeat"])
    except LinkClosed:
        pass


def _work(link: blocking_link.BlockingLink, message: list[Any], attached: list[bytearray]) -> None:
    request = message[1]
    try:
        if message[0] == "compile":
            _, _, options, replicas, partitions = message
            metadata, serialized = compilation.compile_program(bytes(attached[0]), options, replicas, partitions)
            link.send(["reply", request, metadata], [serialized])
        else:
            _, _, options, replicas, partitions = message
            text = compilation.program_text(bytes(attached[0]), options, replicas, partitions)
            link.send(["reply", request, text])
    except LinkClosed:
        pass
    except Exception as error:
        status = error.status if isinstance(error, StatusError) else internal(f"the compiler failed: {error!r}")
        try:
            link.send(["error", request, int(status.code), status.message])
        except LinkClosed:
            pass
