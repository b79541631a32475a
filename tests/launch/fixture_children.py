"""Entry points that stand in for executor and compiler where a test is about the processes, not their work.

What a child does is told by the setting-independent field ``log_prefix`` and by its number: see `main`.
"""

import os
import signal
import socket
import sys
import threading
import time

#: Executor numbers with a meaning of their own.
EXITS_WITH_7 = 107
KILLS_ITSELF = 108
RAISES = 109
REPORTS_DESCRIPTORS = 110


def main(arguments: dict) -> int:
    """Executor and compiler."""
    number = arguments.get("executor", arguments.get("compiler"))
    print(f"child {arguments['log_prefix']} runs with agent {arguments['agent']}")
    if number == EXITS_WITH_7:
        return 7
    if number == KILLS_ITSELF:
        os.kill(os.getpid(), signal.SIGILL)
    if number == RAISES:
        raise RuntimeError("a mistake in the executor")
    if number == REPORTS_DESCRIPTORS:
        names = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        # The last one is the listing's own, the one before the channel to the template.
        print(f"descriptors {names[:-1]} threads {threading.active_count()}")
        opened = socket.socket()
        opened.close()
        return 0
    print(f"descriptors ok {sys.stdout.line_buffering}")
    while True:
        time.sleep(3600)
