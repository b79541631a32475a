"""The table of event kinds is that of the events that are emitted."""

import ast
from pathlib import Path

import ridgeway
from ridgeway.timeline.kinds import KINDS

#: Emitted under a name that is made up where it happens.
MADE_UP = {"survivors_aborted", "generation_left", "persistence_read", "persistence_write"}


def test_every_kind_that_is_emitted_is_listed_and_no_other() -> None:
    emitted: set[str] = set()
    for path in Path(ridgeway.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if name in ("emit", "_emit", "Emit") and isinstance(first, ast.Constant):
                emitted.add(first.value)
    assert emitted | MADE_UP == set(KINDS)
    assert list(KINDS) == sorted(KINDS)
