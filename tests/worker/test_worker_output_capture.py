"""What user code prints goes to the log and, line by line, to the controller."""

import os
import subprocess
import sys

PROGRAM = """
import os, sys
from ridgeway.worker import output_capture
said = []
end_lines = output_capture.capture(lambda stream, line: said.append((stream, line)))
print("one", end=" ")
print("line\\n\\nthree")
print("to stderr", file=sys.stderr, end="")
assert said == [("stdout", "one line"), ("stdout", ""), ("stdout", "three")], said
end_lines()
assert said[3:] == [("stderr", "to stderr")], said
end_lines()
sys.stdout.write("x" * 200_000 + "\\n")
assert len(said[4][1]) == output_capture.LINE_CHARACTERS and len(said) == 5
sys.stdout.flush()
if os.fork() == 0:
    print("from a child")
    end_lines()
    sys.stdout.flush()
    os._exit(len(said) - 5)
assert os.wait()[1] == 0
assert sys.stdout.fileno() == 1 and not sys.stdout.isatty() and sys.stdout.encoding
sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
"""


def test_captured_streams():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False,
        env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one line\n\nthree\n") and done.stdout.endswith("from a child\n")
    assert done.stderr == "to stderr"
