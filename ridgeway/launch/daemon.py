"""`ridgeway up` and `ridgeway down`: a supervisor that goes on after the command that started it has returned."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ridgeway.launch import cluster_folder
from ridgeway.launch.cluster_folder import ClusterError, ClusterRecord
from ridgeway.launch.foreground import SIGNALS, until_signal
from ridgeway.launch.local import LaunchError, LocalCluster, LocalOptions
from ridgeway.processes import send_signal, signal_name

#: How long `down` leaves a supervisor to take its cluster down, before it is killed and everything with it.
DOWN_DEADLINE_SECONDS = 30.0
KILLED_DEADLINE_SECONDS = 5.0
POLL_SECONDS = 0.05

EXIT_FAILED = 1


class Interrupted(Exception):
    """Ctrl-C while a cluster was coming up."""


async def serve(options: LocalOptions, say: Callable[[str], None], ready: Callable[[ClusterRecord], None]) -> int:
    """Supervise a cluster until a signal ends it or it fails; returns the exit code.

    Args:
      options: the cluster.
      say: told what is happening.
      ready: called once when it is up.

    Raises:
      LaunchError, cluster_folder.ClusterError: it did not come up. Nothing is left running.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue(maxsize=100)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, lambda n=number: None if signals.full() else signals.put_nowait(n))
    cluster = LocalCluster(options, say)
    reason = "the start failed"
    try:
        interrupted = await until_signal(cluster.start(), signals)
        if interrupted is not None:
            reason = signal_name(interrupted)
            return 128 + interrupted
        assert cluster.record is not None
        ready(cluster.record)
        interrupted = await until_signal(asyncio.shield(cluster.failure), signals)
        if interrupted is not None:
            reason = signal_name(interrupted)
            return 0
        reason = f"it has failed: {cluster.failure.result()}"
        say(reason)
        return EXIT_FAILED
    finally:
        await cluster.stop(reason)


def start_detached(options: LocalOptions, say: Callable[[str], None]) -> ClusterRecord:
    """Start a supervisor in a session of its own and wait until its cluster is ready.

    Ctrl-C while it starts takes everything down again.

    Raises:
      LaunchError: it did not come up; the message says why. Nothing is left running.
      Interrupted: by Ctrl-C; nothing is left running.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _detach(options, writer)
    os.close(writer)
    os.waitpid(child, 0)
    supervisor = 0
    interrupted = False
    with os.fdopen(reader) as messages:
        while True:
            try:
                for line in messages:
                    match json.loads(line):
                        case {"supervisor": int(pid)}:
                            supervisor = pid
                        case {"say": str(text)}:
                            say(text)
                        case {"ready": dict(record)}:
                            return ClusterRecord(**record)
                        case {"failed": str(text)}:
                            if interrupted:
                                raise Interrupted("interrupted; everything is down")
                            raise LaunchError(text)
                raise LaunchError("the supervisor ended without a word; see supervisor.log in the cluster's logs")
            except KeyboardInterrupt:
                if not supervisor or interrupted:
                    raise
                interrupted = True
                send_signal(supervisor, signal.SIGTERM)


def _detach(options: LocalOptions, writer: int) -> NoReturn:
    """In the first fork: become the supervisor, out of reach of the terminal."""
    code = EXIT_FAILED
    try:
        os.setsid()
        if os.fork() != 0:
            # Only a process that leads no session can never get a terminal.
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        code = _supervise(options, writer)
    finally:
        os._exit(code)


def _supervise(options: LocalOptions, writer: int) -> int:
    channel: int | None = writer

    def tell(message: dict[str, Any]) -> None:
        if channel is None:
            return
        try:
            os.write(channel, json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # Nobody waits any more; the supervisor's log has it too.

    def ready(record: ClusterRecord) -> None:
        nonlocal channel
        tell({"ready": {name: getattr(record, name) for name in ClusterRecord.__dataclass_fields__}})
        os.close(writer)
        channel = None

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    tell({"supervisor": os.getpid()})
    try:
        code = asyncio.run(serve(options, lambda text: tell({"say": text}), ready))
    except (LaunchError, ClusterError) as error:
        tell({"failed": str(error)})
        return EXIT_FAILED
    except Exception as error:
        tell({"failed": f"the supervisor failed: {type(error).__name__}: {error}"})
        return EXIT_FAILED
    if code > 128:
        tell({"failed": f"interrupted by {signal_name(code - 128)}; everything is down"})
    return code


def stop_cluster(name: str, say: Callable[[str], None]) -> None:
    """Stop a running cluster's supervisor and wait until all of it is gone.

    Raises:
      ClusterError: it cannot be stopped.
    """
    path = cluster_folder.runtime_root() / name
    pid = cluster_folder.supervisor_pid(name)
    if pid is None:
        raise ClusterError(f"cluster {name!r} is not running")
    if not send_signal(pid, signal.SIGTERM):
        raise ClusterError(f"cannot signal the supervisor (pid {pid}) of cluster {name!r}")
    if _wait_gone(path, DOWN_DEADLINE_SECONDS):
        return
    say(f"the supervisor (pid {pid}) does not end within {DOWN_DEADLINE_SECONDS:g} s: killing it with its cluster")
    send_signal(pid, signal.SIGKILL)
    if not _wait_gone(path, KILLED_DEADLINE_SECONDS):
        raise ClusterError(f"cluster {name!r} does not end: look at the supervisor, pid {pid}")


def _wait_gone(path: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while cluster_folder.is_running(path):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def print_line(text: str) -> None:
    """How the foreground commands say things: a line on stderr."""
    try:
        print(f"ridgeway: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # Nobody reads it any more; the cluster is looked after all the same.
