"""The table of results, in Markdown."""

import dataclasses
import re
from collections import Counter

from conformance.excuses import Excuse, Kind, excuse_for, refuses_several_slices
from conformance.suites import FileRun, Outcome

DIFFERENCES_SHOWN = 40
"""Unexplained differences that are listed for each file and topology; the rest is counted."""
EXCUSED_SHOWN = 12
"""Names of tests that are listed with an excuse, for each file and topology."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterRun:
    """One file through one cluster, and what it left behind."""

    run: FileRun
    left_behind: str = ""


@dataclasses.dataclass(slots=True)
class FileResult:
    """One file natively and through each topology."""

    name: str
    native: FileRun
    through: dict[str, ClusterRun] = dataclasses.field(default_factory=dict)
    shown_as_one: dict[str, ClusterRun] = dataclasses.field(default_factory=dict)
    """the tests that `jax.make_mesh` refused for the number of slices, on a cluster that shows them as one"""

    def expected(self) -> list[str]:
        """Tests that pass natively: those that must pass through a cluster."""
        return [name for name, outcome in self.native.tests.items() if outcome.outcome == "passed"]

    def refused(self, topology: str) -> list[str]:
        """Tests that pass natively and that `jax.make_mesh` refuses here for the number of slices."""
        tests = self.through[topology].run.tests
        return [
            name for name in self.expected()
            if name in tests and tests[name].outcome != "passed" and refuses_several_slices(tests[name].reason)
        ]  # fmt: skip

    def outcomes(self, topology: str) -> dict[str, Outcome]:
        """Of each expected test its outcome: of those that `jax.make_mesh` refused, where the slices show as one."""
        here = self.through[topology].run.tests
        again = self.shown_as_one[topology].run.tests if topology in self.shown_as_one else {}
        refused = set(self.refused(topology))
        missing = Outcome("not run")
        return {name: (again if name in refused else here).get(name, missing) for name in self.expected()}

    def left_behind(self, topology: str) -> str:
        """What its runs left there."""
        runs = [runs[topology] for runs in (self.through, self.shown_as_one) if topology in runs]
        return ", ".join(run.left_behind for run in runs if run.left_behind)


@dataclasses.dataclass(slots=True)
class Tally:
    """Tests that pass natively, by what became of them."""

    expected: int = 0
    passed: int = 0
    as_one: int = 0
    """of ``passed``, those where the slices show as one"""
    granted: int = 0
    inapplicable: int = 0
    excused: int = 0
    other: int = 0

    def __add__(self, more: "Tally") -> "Tally":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)
        return Tally(*(a + b for a, b in pairs))


@dataclasses.dataclass(slots=True)
class Differences:
    """Tests that pass natively and not here."""

    excused: dict[Excuse, list[str]] = dataclasses.field(default_factory=dict)
    unexplained: dict[str, Outcome] = dataclasses.field(default_factory=dict)


def differences(result: FileResult, topology: str) -> Differences:
    """What of a file does not pass, by excuse, and without one."""
    found = Differences()
    for name, outcome in result.outcomes(topology).items():
        if outcome.outcome != "passed":
            excuse = excuse_for(name, outcome.reason)
            if excuse is None:
                found.unexplained[name] = outcome
            else:
                found.excused.setdefault(excuse, []).append(name)
    return found


def tally(result: FileResult, topology: str) -> Tally:
    """A file's counts on a topology."""
    outcomes = result.outcomes(topology)
    found = differences(result, topology)
    counts: Counter[Kind] = Counter()
    for excuse, names in found.excused.items():
        counts[excuse.kind] += len(names)
    return Tally(
        expected=len(outcomes),
        passed=sum(outcome.outcome == "passed" for outcome in outcomes.values()),
        as_one=sum(outcomes[name].outcome == "passed" for name in result.refused(topology)),
        granted=counts[Kind.GRANTED],
        inapplicable=counts[Kind.INAPPLICABLE],
        excused=counts[Kind.EXCUSED],
        other=len(found.unexplained),
    )


def render(results: list[FileResult], topologies: list[str], about: list[str]) -> str:
    """The whole document."""
    lines = ["# JAX's own tests through Ridgeway", "", *about, ""]
    totals = {topology: _total(results, topology) for topology in topologies}
    for topology, total in totals.items():
        lines += [*_rates(topology, total), ""]
    heads = "".join(f" {topology} | granted | n/a | excused | other | left behind |" for topology in topologies)
    lines += [
        f"| file | tests | run | native |{heads}",
        "|---|---:|---:|---:|" + "---:|---:|---:|---:|---:|---|" * len(topologies),
    ]
    for result in results:
        native = result.native
        row = (
            f"| {result.name} | {native.collected or ''} | {len(native.tests)} | "
            f"{len(result.expected())}{_note(native)} |"
        )
        for topology in topologies:
            row += _cells(result, topology)
        lines.append(row)
    sums = [sum(count) for count in zip(*((r.native.collected, len(r.native.tests)) for r in results), strict=True)]
    row = "| **all** |" + "".join(f" {count} |" for count in sums)
    row += f" **{sum(len(result.expected()) for result in results)}** |"
    for total in totals.values():
        row += f" **{total.passed}** | {total.granted} | {total.inapplicable} | {total.excused} | {total.other} | |"
    lines += [row, "", "## Differences", ""]
    for topology in topologies:
        for result in results:
            if topology in result.through:
                lines += _described(result, topology)
    return "\n".join(lines).rstrip("\n") + "\n"


def _total(results: list[FileResult], topology: str) -> Tally:
    return sum((tally(result, topology) for result in results if topology in result.through), Tally())


def _rates(topology: str, total: Tally) -> list[str]:
    def share(passed: int, wanted: int) -> str:
        return f"{passed} of {wanted}, {100 * passed / wanted if wanted else 100:.2f} %"

    strict = total.expected - total.granted
    applicable = strict - total.inapplicable
    lines = [
        f"**{topology}**: of {total.expected} tests that pass natively {total.passed} pass. That is",
        f"- of all but those granted ({total.granted}): {share(total.passed, strict)};",
        f"- of all but those that are not applicable too ({total.inapplicable}): {share(total.passed, applicable)};",
        f"- of all but those excused too ({total.excused}): {share(total.passed, applicable - total.excused)}.",
    ]
    if total.as_one:
        lines.append(
            f"- {total.as_one} of them make their mesh with `jax.make_mesh`, which refuses devices of several slices "
            "on whatever backend; they pass on the same topology with `--set slices_shown=one`."
        )
    return lines


def _cells(result: FileResult, topology: str) -> str:
    if topology not in result.through:
        return " – |" * 6
    counts = tally(result, topology)
    passed = f"{counts.passed} ({counts.as_one} as one slice)" if counts.as_one else f"{counts.passed}"
    left = result.left_behind(topology) or "nothing"
    note = _note(result.through[topology].run)
    numbers = (passed, counts.granted, counts.inapplicable, counts.excused, counts.other)
    return "".join(f" {number} |" for number in numbers) + f" {left}{note} |"


def _note(run: FileRun) -> str:
    return f" ({run.problem})" if run.problem else ""


def _described(result: FileResult, topology: str) -> list[str]:
    found = differences(result, topology)
    if not found.excused and not found.unexplained:
        return []
    lines = [f"### {result.name}, {topology}", ""]
    for excuse, names in sorted(found.excused.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(f"`{name.rpartition('::')[2]}`" for name in names[:EXCUSED_SHOWN])
        more = f" and {len(names) - EXCUSED_SHOWN} more" if len(names) > EXCUSED_SHOWN else ""
        lines.append(f"- {excuse.kind.value}, {len(names)} × {excuse.title}: {shown}{more}")
    for name, outcome in list(found.unexplained.items())[:DIFFERENCES_SHOWN]:
        reason = re.sub(r"\s+", " ", outcome.reason)[:240].replace("|", "\\|").replace("`", "'")
        lines.append(f"- `{name}` {outcome.outcome}: {reason}")
    if len(found.unexplained) > DIFFERENCES_SHOWN:
        lines.append(f"- and {len(found.unexplained) - DIFFERENCES_SHOWN} more")
    return [*lines, ""]
