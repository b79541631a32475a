"""Pictures of recoveries. Needs matplotlib, which the core does not install."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeway.timeline.phases import TITLES, UNATTRIBUTED, Phase
from ridgeway.timeline.recovery import Recovery
from ridgeway.timeline.windows import COMPLETED, REPAIRED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's "muted" scheme (https://personal.sron.nl/~pault/), made for readers with any colour vision. What can
# stand side by side is far apart in lightness, too.
_COLOURS = {
    "detected": "#882255",
    "survivors_aborted": "#DDCC77",
    "error_raised": "#CC6677",
    "attempt_failed": "#555555",
    "slice_available": "#332288",
    "resize_decided": "#332288",
    "slices_accepted": "#88CCEE",
    "function_reentered": "#117733",
    "generation_ready": "#AA4499",
    "state_restored": "#44AA99",
    "first_step_done": "#999933",
    UNATTRIBUTED: "#DDDDDD",
}
_INK = "#222222"
_FAINT = "#777777"
_RULE = "#D8D8D8"
_STEP = "#332288"
_RECOVERY = "#CC6677"

#: More recoveries than this are drawn as bars without numbers on them.
_LABELLED_LIMIT = 40

#: Right end of the cascade's axis and width of a character on it, as parts of the recovery's total.
_CASCADE_LIMIT = 1.12
_CHARACTER_WIDTH = 0.0115

_DOTS_PER_INCH = 150
_WIDTH_INCHES = 11.0


class PlotError(RuntimeError):
    """A plot cannot be made; the message says why and what to do."""


def plot(recoveries: Sequence[Recovery], path: Path, step_times: Sequence[tuple[float, float]] | None = None) -> None:
    """Draw where the seconds went, and how the step counter went back, into a PNG.

    One recovery is drawn as a cascade, a row for each phase; several as a stacked bar each.

    Args:
      recoveries: at least one.
      path: the PNG to write.
      step_times: wall time (seconds) and step number of every step that the program finished, in the order in
        which it did; draws a second panel.

    Raises:
      PlotError: matplotlib is missing, or there is nothing to draw.
      OSError: the file cannot be written.
    """
    if not recoveries:
        raise PlotError("there is no recovery to plot: no host was lost in these events")
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib ({error}); install it: pip install matplotlib") from None
    single = len(recoveries) == 1
    rows = len(_joined(recoveries[0])) + 1 if single else len(recoveries)
    heights = [1.1 + min(0.38 * rows, 12.0)]
    if not single:
        heights.append(0.75)
    if step_times:
        heights.append(3.2)
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "axes.edgecolor": _RULE}):
        figure = Figure(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)  # pyright: ignore
        panels = iter(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
        if single:
            _draw_cascade(next(panels), recoveries[0])
        else:
            _draw_bars(next(panels), recoveries)
            _draw_key(next(panels), recoveries)
        if step_times:
            _draw_steps(next(panels), recoveries, step_times)
        figure.savefig(path, dpi=_DOTS_PER_INCH, format="png", facecolor="white")


def _joined(recovery: Recovery) -> list[Phase]:
    """Its phases without the empty ones."""
    return [phase for phase in recovery.phases if phase.seconds > 0]


def _draw_cascade(axes: "Axes", recovery: Recovery) -> None:
    phases = _joined(recovery)
    total = recovery.seconds or 1e-9
    for phase in phases:
        _bar(axes, 0, phase, height=0.72, outlined=phase.seconds > 0.005 * total)
    axes.text(total * 1.01, 0, _seconds(recovery.seconds), va="center", weight="bold", color=_INK)
    for row, phase in enumerate(phases, 1):
        _bar(axes, row, phase, height=0.62, outlined=False)
        end = phase.begin_seconds + phase.seconds
        text = _seconds(phase.seconds)
        if phase.compiling_seconds >= 0.05 * total:
            text += f"  ({_seconds(phase.compiling_seconds)} of it compiling)"
        width = _CHARACTER_WIDTH * len(text) * total
        if end + width <= _CASCADE_LIMIT * total:
            x, align, colour = end + 0.01 * total, "left", _INK
        elif phase.seconds > width + 0.02 * total:
            x, align, colour = end - 0.01 * total, "right", _on(phase.name)
        else:
            x, align, colour = phase.begin_seconds - 0.01 * total, "right", _INK
        axes.text(x, row, text, va="center", ha=align, color=colour)
        if row < len(phases):
            axes.plot([end, end], [row + 0.31, row + 0.69], color=_FAINT, linewidth=0.8)
    begin = "kill" if recovery.kill_known else "detection"
    whole = f"{begin} to next step" if recovery.outcome == COMPLETED else "in all"
    labels = [whole, *(phase.title for phase in phases)]
    axes.set_yticks(range(len(labels)), labels)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, _CASCADE_LIMIT * total)
    axes.set_xlabel("seconds since the kill" if recovery.kill_known else "seconds since the loss was detected")
    axes.set_title(_title(recovery), loc="left", fontsize=13, weight="bold", color=_INK, pad=26)
    axes.text(
        0, 1, "Each bar ends with what it is named after.", transform=axes.transAxes, fontsize=9, color=_FAINT,
        va="bottom",
    )  # fmt: skip
    _tidy(axes)


def _draw_bars(axes: "Axes", recoveries: Sequence[Recovery]) -> None:
    longest = max(recovery.seconds for recovery in recoveries) or 1e-9
    few = len(recoveries) <= _LABELLED_LIMIT
    for row, recovery in enumerate(recoveries):
        for phase in _joined(recovery):
            outlined = few and phase.seconds > 0.005 * longest
            _bar(axes, row, phase, height=0.72 if few else 1.0, outlined=outlined)
            # About 0.9 % of the panel's width for a character.
            if few and phase.seconds > 0.05 * longest:
                middle = phase.begin_seconds + phase.seconds / 2
                axes.text(
                    middle, row, f"{phase.seconds:.1f}", ha="center", va="center", fontsize=9, color=_on(phase.name)
                )
        if few:
            axes.text(recovery.seconds + 0.008 * longest, row, _seconds(recovery.seconds), va="center", weight="bold")
    if few:
        axes.set_yticks(range(len(recoveries)), [f"{r.number}: {_lost(r)}" for r in recoveries])
    else:
        every = -(-len(recoveries) // 20)
        axes.set_yticks(range(0, len(recoveries), every), [str(r.number) for r in recoveries[::every]])
        axes.set_ylabel("recovery")
    axes.set_ylim(len(recoveries) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.1)
    known = all(recovery.kill_known for recovery in recoveries)
    axes.set_xlabel("seconds since the kill" if known else "seconds since the kill, or the loss where none is known")
    totals = sorted(recovery.seconds for recovery in recoveries)
    middle = (totals[(len(totals) - 1) // 2] + totals[len(totals) // 2]) / 2
    axes.set_title(
        f"{len(recoveries)} recoveries: {_seconds(sum(totals))} in total, "
        f"{_seconds(middle)} median, {_seconds(totals[-1])} at most",
        loc="left", fontsize=13, weight="bold", color=_INK, pad=12,
    )  # fmt: skip
    _tidy(axes)


def _draw_key(axes: "Axes", recoveries: Sequence[Recovery]) -> None:
    from matplotlib.patches import Patch

    used = [name for name in _COLOURS if any(phase.name == name for r in recoveries for phase in _joined(r))]
    titles: dict[str, list[str]] = {}
    styles: dict[str, dict[str, Any]] = {}
    for name in used:
        titles.setdefault(_COLOURS[name], []).append(TITLES[name])
        styles[_COLOURS[name]] = _style(name)
    handles = [Patch(**styles[colour], label=" / ".join(titles[colour])) for colour in styles]
    axes.legend(handles=handles, loc="center", ncols=min(4, len(handles)), frameon=False, fontsize=9)
    axes.set_axis_off()


def _draw_steps(axes: "Axes", recoveries: Sequence[Recovery], step_times: Sequence[tuple[float, float]]) -> None:
    zero = recoveries[0].start_time
    times = [time - zero for time, _ in step_times]
    steps = [step for _, step in step_times]
    top = max(steps)
    for index, recovery in enumerate(recoveries):
        begin = recovery.start_time - zero
        axes.axvspan(
            begin, begin + recovery.seconds, color=_RECOVERY, alpha=0.18, linewidth=0,
            label="recovery" if index == 0 else None,
        )  # fmt: skip
    marker = "o" if len(steps) <= 400 else None
    segments = _rising(times, steps)
    for index, (xs, ys) in enumerate(segments):
        axes.plot(
            xs,
            ys,
            color=_STEP,
            linewidth=1.4,
            marker=marker,
            markersize=3,
            label="step finished" if index == 0 else None,
        )
    # Each fall of the counter: from the last step that was seen to the one that is done again.
    for (xs, ys), (later_xs, later_ys) in itertools.pairwise(segments):
        axes.plot([xs[-1], later_xs[0]], [ys[-1], later_ys[0]], color=_FAINT, linestyle=":", linewidth=1.4)
        late = later_xs[0] > 0.8 * max(times) + 0.2 * min(times)
        if len(segments) <= 6:
            axes.annotate(
                f"back from step {ys[-1]:g} to {later_ys[0]:g}",
                (later_xs[0], later_ys[0]), xytext=(-2 if late else 8, -12), textcoords="offset points",
                ha="right" if late else "left", va="top", color=_INK, fontsize=9,
            )  # fmt: skip
    margin = 0.12 * (top - min(steps) or 1)
    axes.set_ylim(min(steps) - 1.6 * margin, top + margin)
    axes.set_ylabel("step")
    axes.set_xlabel("seconds since the first kill" if recoveries[0].kill_known else "seconds since the first loss")
    axes.set_title("Step counter of the one program", loc="left", fontsize=11, weight="bold", color=_INK, pad=8)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9, borderaxespad=0.2)
    _tidy(axes, both=True)


def _rising(times: Sequence[float], steps: Sequence[float]) -> list[tuple[list[float], list[float]]]:
    """The steps cut where the counter does not grow."""
    segments: list[tuple[list[float], list[float]]] = []
    for time, step in zip(times, steps, strict=True):
        if not segments or step <= segments[-1][1][-1]:
            segments.append(([], []))
        segments[-1][0].append(time)
        segments[-1][1].append(step)
    return segments


def _style(name: str) -> dict[str, Any]:
    hatch = {"hatch": "////", "edgecolor": "#999999"} if name == UNATTRIBUTED else {"edgecolor": "white"}
    return {"facecolor": _COLOURS[name], "linewidth": 0.6, **hatch}


def _bar(axes: "Axes", row: int, phase: Phase, height: float, outlined: bool) -> None:
    style = _style(phase.name)
    if not outlined:
        style["linewidth"] = 0
    axes.barh(row, phase.seconds, left=phase.begin_seconds, height=height, **style)


def _tidy(axes: "Axes", both: bool = False) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=_INK)
    axes.grid(axis="both" if both else "x", color=_RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def _lost(recovery: Recovery) -> str:
    slices = recovery.slices
    if not slices:
        return "a host"
    return f"slice {slices[0]}" if len(slices) == 1 else "slices " + ", ".join(map(str, slices))


def _title(recovery: Recovery) -> str:
    begin = "kill" if recovery.kill_known else "detection"
    ends = {COMPLETED: f"from {begin} to next step", REPAIRED: f"from {begin} until all slices were back"}
    end = ends.get(recovery.outcome, f"since the {begin}, and not recovered")
    return f"Loss of {_lost(recovery)}: {_seconds(recovery.seconds)} {end}"


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _on(name: str) -> str:
    """The colour of text on a phase's bar."""
    red, green, blue = (int(_COLOURS[name][index : index + 2], 16) for index in (1, 3, 5))
    # Relative luminance as people see it (ITU-R BT.601).
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else _INK
