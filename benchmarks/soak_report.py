"""The results of soaks: judged, kept, shown as text and drawn. A file holds the last result of each mode."""

import dataclasses
import json
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak_resources import SETTLED_AFTER, Sample, Trend, comparable, trends
from ridgeway.timeline import report as timelines
from ridgeway.timeline.recovery import find_recoveries

TITLES = {
    "pause": "Pause and resume",
    "resize": "Resize with checkpoints",
    "snapshots": "Resize with snapshots",
}
WRONG_SHOWN = 10
MEBIBYTE = 1 << 20


def result(
    options: dict[str, Any], strikes: Sequence[Any], samples: Sequence[Sample], events: Sequence[dict[str, Any]],
    problem: str | None, wrong: list[str], exact: int, steps: int, last_step: int, attempts: int, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Everything about one run, as plain values."""
    found = trends(samples)
    recoveries = find_recoveries(events, [s.struck.wall for s in strikes])
    hits = [s for s in strikes if s.struck.victims]
    grown = [f"{t.role}, {t.of}: {t.metric} {_amount(t, t.first)} -> {_amount(t, t.last)}" for t in found if not t.flat]
    recovered = sum(s.recovered_seconds is not None for s in hits)
    judged = bool(found) or options["faults"] <= SETTLED_AFTER
    return {
        "good": problem is None and not wrong and judged and not grown and recovered == len(hits) >= options["faults"],
        "problem": problem,
        "options": options,
        "faults": len(hits),
        "recovered": recovered,
        "strikes": [_strike(s) for s in strikes],
        "wrong": wrong,
        "grown": grown,
        "trends": [dataclasses.asdict(t) | {"flat": t.flat} for t in found],
        "compared": len(comparable(samples)),
        "samples": [dataclasses.asdict(s) for s in samples],
        "timelines": timelines.to_json(recoveries),
        "exact": exact,
        "steps": steps,
        "last_step": last_step,
        "attempts": attempts,
        "seconds": round(seconds, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _strike(strike: Any) -> dict[str, Any]:
    struck = strike.struck
    return {
        **dataclasses.asdict(strike.fault), "time": struck.wall, "victims": [list(v.host) for v in struck.victims],
        "pids": struck.pids, "moment_came": strike.moment_came, "seconds": strike.seconds, "step": strike.step,
        "recovered_seconds": strike.recovered_seconds, "attempts": strike.attempts, "lost": strike.lost,
    }  # fmt: skip


def write(report: dict[str, Any], base: Path) -> None:
    """Write ``base.md``, ``base.json`` and ``base.png``, keeping what is there of other modes."""
    base.parent.mkdir(parents=True, exist_ok=True)
    file = base.with_suffix(".json")
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    known[report["options"]["mode"]] = report
    known = {mode: known[mode] for mode in TITLES if mode in known}
    file.write_text(_compact(known))
    base.with_suffix(".md").write_text(render(known, base.with_suffix(".png").name))
    draw(known, base.with_suffix(".png"))


def _compact(known: dict[str, Any]) -> str:
    """JSON with a line for each fault, sample and timeline."""
    parts = []
    for mode, report in known.items():
        fields = []
        for name, value in report.items():
            if name == "timelines":
                rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value["recoveries"])
                rest = {key: item for key, item in value.items() if key != "recoveries"}
                fields.append(f'"timelines":{json.dumps(rest)[:-1]},"recoveries":[\n{rows}]}}')
            elif isinstance(value, list):
                rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
                fields.append(f'"{name}":[\n{rows}]')
            else:
                fields.append(f'"{name}":{json.dumps(value)}')
        parts.append(f'"{mode}":{{\n' + ",\n".join(fields) + "}")
    return "{" + ",\n".join(parts) + "}\n"


def render(known: dict[str, Any], picture: str) -> str:
    """All modes as Markdown."""
    lines = ["# Soak", "", "Many faults in a row under one controller process; see `benchmarks/soak.py`.", ""]
    lines += [f"![recovery times and resources]({picture})", ""]
    for mode, report in known.items():
        lines += _section(TITLES[mode], report)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, report: dict[str, Any]) -> list[str]:
    options, strikes = report["options"], report["strikes"]
    hits = [s for s in strikes if s["victims"]]
    summary = report["timelines"]["summary"]
    lines = [
        f"## {title}: {'everything as it must be' if report['good'] else 'NOT as it must be'}", "",
        f"`{report['command']}` ({report['seconds']:.0f} s, load average at the end {report['load_average']})", "",
        f"- **{report['recovered']} of {report['faults']} faults recovered**; {len(strikes) - len(hits)} more found "
        f"nobody to hit. {sum(len(s['victims']) for s in hits)} hosts were hit.",
        f"- One controller process: {report['attempts']} attempts, {report['steps']} steps made, up to step "
        f"{report['last_step']}.",
        f"- Losses: {_losses(report)}.",
        f"- Flat from the {SETTLED_AFTER}th fault to the last: {_flat(report)}.",
    ]  # fmt: skip
    if report["problem"]:
        lines.append(f"- It ended early: {report['problem']}")
    if summary["count"]:
        lines.append(
            f"- {summary['count']} recoveries in the timeline, kill to next step {summary['median_seconds']:.1f} s "
            f"median, {summary['max_seconds']:.1f} s at most; {summary['undisturbed']} faults that no step noticed."
        )
    lines += ["", "| fault | times | recovered, median s | largest s |", "|---|---|---|---|"]
    for kind, count in sorted(Counter(s["kind"] for s in hits).items()):
        times = [s["recovered_seconds"] for s in hits if s["kind"] == kind and s["recovered_seconds"] is not None]
        lines.append(f"| {kind} | {count} | {_median(times)} | {_largest(times)} |")
    lines += ["", "| moment | times | recovered, median s | largest s |", "|---|---|---|---|"]
    for moment, count in sorted(Counter(s["moment"] for s in hits).items()):
        times = [s["recovered_seconds"] for s in hits if s["moment"] == moment and s["recovered_seconds"] is not None]
        missed = sum(s["moment"] == moment and not s["moment_came"] for s in hits)
        note = f" ({missed} did not come)" if missed else ""
        lines.append(f"| {moment}{note} | {count} | {_median(times)} | {_largest(times)} |")
    lines += ["", "Recovered: every host ready, what lasts undone, and steps made after that.", ""]
    if report["trends"]:
        lines += ["| processes | metric | first quarter | last quarter | highest |", "|---|---|---|---|---|"]
        for row in report["trends"]:
            if row["of"] == "total":
                trend = Trend(*(row[field.name] for field in dataclasses.fields(Trend)))
                amounts = " | ".join(_amount(trend, value) for value in (trend.first, trend.last, trend.highest))
                lines.append(f"| {trend.role} | {trend.metric} | {amounts} |")
        part = f"{report['compared']} of {len(report['samples'])} samples"
        lines += ["", f"Medians of what was taken after the run-in and at work on the whole mesh ({part}),"]
        lines += ["all processes of a kind together.", ""]
    kept = options["kinds"]
    lines += [f"Faults: {', '.join(kept)}.", ""]
    return lines


def _flat(report: dict[str, Any]) -> str:
    if report["grown"]:
        return "NOT " + "; ".join(report["grown"])
    return "memory, threads, sockets and files of every kind of process" if report["trends"] else "not known, too short"


def _losses(report: dict[str, Any]) -> str:
    if report["wrong"]:
        shown = "; ".join(report["wrong"][:WRONG_SHOWN])
        return f"{len(report['wrong'])} are NOT those of the undisturbed run: {shown}"
    if report["problem"]:
        return "not compared"
    if report["options"]["mode"] == "pause":
        return "every step's is that of the undisturbed run, bit by bit"
    exact = report["exact"]
    return f"those of the undisturbed run, bit by bit in the {exact} steps before the mesh first changed, then closely"


def _median(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f}" if times else ""


def _largest(times: Sequence[float]) -> str:
    return f"{max(times):.1f}" if times else ""


def _amount(trend: Trend, value: float) -> str:
    return f"{value / MEBIBYTE:.0f} MiB" if trend.metric == "memory" else f"{value:.0f}"


def draw(known: dict[str, Any], path: Path) -> None:
    """A row for each mode: how long recoveries took, and what the processes used over the faults."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(16, 4.2 * len(known)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(known), 3, squeeze=False)
    for row, (mode, report) in zip(axes, known.items(), strict=True):
        recoveries = [r["seconds"] for r in report["timelines"]["recoveries"] if r["outcome"] == "completed"]
        recovered = [s["recovered_seconds"] for s in report["strikes"] if s["recovered_seconds"] is not None]
        for values, label in ((recoveries, "kill to next step"), (recovered, "fault to all is well")):
            if values:
                ordered = sorted(values)
                shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
                row[0].step(ordered, shares, where="post", label=f"{label} ({len(ordered)})")
        row[0].set(title=TITLES[mode], xlabel="seconds", xscale="log", ylabel="share recovered", ylim=(0, 1))
        row[0].xaxis.set_major_formatter("{x:g}")
        row[0].grid(alpha=0.3)
        if recoveries or recovered:
            row[0].legend(loc="lower right", fontsize="small")
        samples = report["samples"]
        roles = sorted({role for taken in samples for role in taken["roles"]})
        for place, metric, scale, unit in ((row[1], "memory", MEBIBYTE, "MiB"), (row[2], "threads", 1, "threads")):
            for role in roles:
                totals = [sum(u[metric] for u in taken["roles"].get(role, [])) / scale for taken in samples]
                place.plot([taken["fault"] for taken in samples], totals, label=role, linewidth=1)
            place.set(title=f"{metric} of all processes of a kind", xlabel="fault", ylabel=unit, yscale="log")
            place.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            place.yaxis.set_major_formatter("{x:g}")
            place.yaxis.set_minor_formatter("")
            place.grid(alpha=0.3)
            if roles:
                place.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=80)
