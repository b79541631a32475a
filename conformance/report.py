"""The table of results, in Markdown."""

import dataclasses
import re
from collections import Counter

from conformance.excuses import excuse_for
from conformance.suites import FileRun, Outcome

DIFFERENCES_SHOWN = 40
"""Unexplained differences that are listed for each file and topology; the rest is counted."""


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
    through: dict[str, ClusterRun]

    def expected(self) -> list[str]:
        """Tests that pass natively: those that must pass through a cluster."""
        return [name for name, outcome in self.native.tests.items() if outcome.outcome == "passed"]

    def differences(self, topology: str) -> dict[str, Outcome]:
        """Tests that pass natively and not through this topology."""
        tests = self.through[topology].run.tests
        missing = Outcome("not run")
        return {name: found for name in self.expected() if (found := tests.get(name, missing)).outcome != "passed"}


def _split(differences: dict[str, Outcome]) -> tuple[Counter[str], dict[str, Outcome]]:
    """Differences by excuse, and those without one."""
    excused: Counter[str] = Counter()
    unexplained: dict[str, Outcome] = {}
    for name, outcome in differences.items():
        title = excuse_for(name, outcome.reason)
        if title is None:
            unexplained[name] = outcome
        else:
            excused[title] += 1
    return excused, unexplained


def render(results: list[FileResult], topologies: list[str], about: list[str]) -> str:
    """The whole document."""
    lines = ["# JAX's own tests through Ridgeway", ""]
    lines += [*about, ""]
    heads = "".join(f" {topology} passed | excused | other | left behind |" for topology in topologies)
    lines += [f"| file | native passed |{heads}", "|---|---:|" + "---:|---:|---:|---|" * len(topologies)]
    totals = {topology: [0, 0, 0] for topology in topologies}
    native_total = 0
    for result in results:
        expected = len(result.expected())
        native_total += expected
        row = f"| {result.name} | {expected}{_note(result.native)} |"
        for topology in topologies:
            through = result.through.get(topology)
            if through is None:
                row += " – | – | – | – |"
                continue
            differences = result.differences(topology)
            excused, unexplained = _split(differences)
            counts = (expected - len(differences), sum(excused.values()), len(unexplained))
            totals[topology] = [a + b for a, b in zip(totals[topology], counts, strict=True)]
            row += " {} | {} | {} |".format(*counts) + f" {through.left_behind or 'nothing'}{_note(through.run)} |"
        lines.append(row)
    row = f"| **all** | **{native_total}** |"
    for topology in topologies:
        passed, excused_count, other = totals[topology]
        row += f" **{passed}** | {excused_count} | {other} | |"
    lines += [row, ""]
    for topology in topologies:
        passed, excused_count, other = totals[topology]
        wanted = native_total - excused_count
        share = 100 * passed / wanted if wanted else 100.0
        lines.append(f"- {topology}: {passed} of {wanted} tests that pass natively and are not excused: {share:.2f} %.")
    lines += ["", "## Differences", ""]
    for topology in topologies:
        for result in results:
            if topology in result.through:
                lines += _differences(result, topology)
    return "\n".join(lines) + "\n"


def _note(run: FileRun) -> str:
    return f" ({run.problem})" if run.problem else ""


def _differences(result: FileResult, topology: str) -> list[str]:
    excused, unexplained = _split(result.differences(topology))
    if not excused and not unexplained:
        return []
    lines = [f"### {result.name}, {topology}", ""]
    lines += [f"- {count} × {title}" for title, count in excused.most_common()]
    for name, outcome in list(unexplained.items())[:DIFFERENCES_SHOWN]:
        reason = re.sub(r"\s+", " ", outcome.reason)[:240].replace("|", "\\|").replace("`", "'")
        lines.append(f"- `{name}` {outcome.outcome}: {reason}")
    if len(unexplained) > DIFFERENCES_SHOWN:
        lines.append(f"- and {len(unexplained) - DIFFERENCES_SHOWN} more")
    return [*lines, ""]
