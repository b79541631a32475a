"""What a demonstration has to prove, as a function of what was observed. No I/O."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeway.demo import job as jobs
from ridgeway.demo.controller import Account
from ridgeway.demo.training import Kill
from ridgeway.timeline.recovery import Recovery

#: Steps after the recovery that nobody had seen before.
NEW_STEPS_WANTED = 10
#: The phases of a recovery sum to its total up to this.
ROUNDING_SECONDS = 0.01
#: One batch's loss says little.
LOSSES_AVERAGED = 5


@dataclass(frozen=True)
class Observed:
    """Everything that the demonstration looked at.

    Attributes:
        steps: how many steps the job was to do.
        records: the steps in the controller's log, in order.
        metrics: the same from MaxText's metrics file, losses at full precision.
        committed: steps whose checkpoint was complete at the end.
        kill: the worker that was killed.
        controller_pid: the process that was started.
        exit_code: the controller's.
        account: what the controller said about itself.
        before: the head's status right before the kill.
        after: the head's status after the recovery.
        events: the head's events.
        recoveries: those in the events.
        left_running: processes of the cluster or the controller that were still there at the end.
    """

    steps: int
    records: Sequence[jobs.StepRecord]
    metrics: Sequence[jobs.StepRecord]
    committed: Sequence[int]
    kill: Kill
    controller_pid: int
    exit_code: int
    account: Account
    before: dict[str, Any]
    after: dict[str, Any]
    events: Sequence[dict[str, Any]]
    recoveries: Sequence[Recovery]
    left_running: Sequence[int]


@dataclass(frozen=True)
class Check:
    """One piece of evidence.

    Attributes:
        subject: what it is about.
        passed: whether it holds.
        text: what was seen; when it does not hold, why not.
    """

    subject: str
    passed: bool
    text: str


def judge(seen: Observed) -> list[Check]:
    """Every piece of evidence, in the order of the story."""
    return [
        _step_counter(seen),
        _repeated_losses(seen),
        _same_process(seen),
        _step_times(seen),
        _untouched_workers(seen),
        _killed_worker(seen),
        _later_checkpoints(seen),
        _end(seen),
        _timeline(seen),
        _nothing_left(seen),
    ]


def hosts(status: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """The hosts of a status by slice and host number."""
    return {(host["slice"], host["host"]): host for part in status["slices"] for host in part["hosts"]}


def excerpt(log_text: str, rewind: jobs.Rewind, around: int = 3) -> list[str]:
    """The lines of a log where the step counter goes back: the steps around it, and what is said between.

    The lines are shortened to the time and MaxText's message; what is left out is marked with ``…``.
    """
    lines = log_text.splitlines()
    step_lines = [index for index, line in enumerate(lines) if jobs.parse_steps(line)]
    if rewind.index >= len(step_lines):
        return []
    first = step_lines[max(0, rewind.index - around)]
    last = step_lines[min(len(step_lines) - 1, rewind.index + around - 1)]
    told = ("completed step", "DATA_LOSS", "DEADLINE_EXCEEDED", "Elastic", "elastic attempt", "restoring from")
    found: list[str] = []
    seen: set[str] = set()
    for index in range(first, last + 1):
        line = lines[index]
        message = line.partition("] ")[2] if line[:1] in "IWEF" and "] " in line else line
        clock = line.split()[1] if line[:1] in "IWEF" and len(line.split()) > 1 else ""
        message = message.split(", TFLOP")[0] if "completed step" in message else message
        if not any(word in line for word in told) or message in seen or line.startswith((" ", "\t")):
            if found and found[-1] != "…":
                found.append("…")
            continue
        # The same exception is printed for each frame that it passes through.
        seen.add(message)
        loss = f", loss: {jobs.parse_steps(line)[0].loss:.3f}" if index in step_lines else ""
        found.append(f"{clock} {message}{loss}".strip())
    return found


def _rewinds(seen: Observed) -> list[jobs.Rewind]:
    return jobs.find_rewinds(seen.records)


def _step_counter(seen: Observed) -> Check:
    subject = "the step counter goes back to a committed step, in one log"
    rewinds = _rewinds(seen)
    if len(rewinds) != 1:
        return Check(subject, False, f"it went back {len(rewinds)} times, not once")
    restored = rewinds[0].next_step - 1
    if restored not in seen.committed:
        return Check(subject, False, f"training went on after step {restored}, which is no committed checkpoint")
    if restored < max(seen.kill.committed):
        return Check(subject, False, f"step {restored} was restored although {max(seen.kill.committed)} was committed")
    following = [record.step for record in seen.records[rewinds[0].index :]]
    if following != list(range(restored + 1, restored + 1 + len(following))):
        return Check(subject, False, f"the steps after the recovery are not consecutive: {following}")
    text = f"step {rewinds[0].last_step}, then step {rewinds[0].next_step}; checkpoint {restored} was the last one"
    return Check(subject, True, text)


def _repeated_losses(seen: Observed) -> Check:
    subject = "steps done twice have the same loss, to the last digit"
    rewinds = jobs.find_rewinds(seen.metrics)
    if len(rewinds) != 1:
        return Check(subject, False, f"the metrics file has {len(rewinds)} returns of the step counter, not one")
    cut = rewinds[0].index
    first = {record.step: record.loss for record in seen.metrics[:cut]}
    again = {record.step: record.loss for record in seen.metrics[cut:]}
    both = sorted(first.keys() & again.keys())
    if not both:
        return Check(subject, False, "no step was done twice")
    different = [step for step in both if first[step] != again[step]]
    if different:
        step = different[0]
        return Check(subject, False, f"step {step}: first {first[step]!r}, then {again[step]!r}")
    return Check(subject, True, f"steps {both[0]} to {both[-1]}; step {both[-1]} both times {again[both[-1]]!r}")


def _same_process(seen: Observed) -> Check:
    subject = "one controller process: same PID before and after, 0 restarts"
    pids = seen.account.start_pids
    if len(pids) != 1:
        return Check(subject, False, f"the controller started {len(pids)} times: {pids}")
    if not pids[0] == seen.account.end_pid == seen.controller_pid:
        return Check(
            subject, False, f"started as {seen.controller_pid}, began as {pids[0]}, ended as {seen.account.end_pid}"
        )
    before, after = ({s["session"] for s in status["sessions"]} for status in (seen.before, seen.after))
    if not before or before != after:
        return Check(subject, False, f"it had sessions {sorted(before)} before the kill and {sorted(after)} after")
    text = f"pid {pids[0]} at the start and at the end, session {min(before)} of the head all the time"
    return Check(subject, True, text)


def _step_times(seen: Observed) -> Check:
    subject = "a plain Python list of step times in it still holds every entry"
    account = seen.account
    if not account.same_list:
        return Check(subject, False, "the list at the end is not the list made at the start, or there is none")
    logged = [(record.step, record.seconds) for record in seen.records]
    if account.length != len(logged) or account.entries != logged:
        return Check(subject, False, f"it has {account.length} entries, and {len(logged)} steps were logged")
    before = seen.kill.steps_before
    text = f"len(step_times) = {account.length}: {before} from before the kill, {len(logged) - before} since"
    return Check(subject, True, text)


def _untouched_workers(seen: Observed) -> Check:
    subject = "workers that were not killed: same process, 0 restarts"
    victim = (seen.kill.slice, seen.kill.host)
    before, after = hosts(seen.before), hosts(seen.after)
    kept, recycled, renewed = [], [], []
    for place in sorted(before.keys() - {victim}):
        old, new = before[place], after.get(place, {})
        name = f"slice {place[0]} host {place[1]}"
        if any(old[field] != new.get(field) for field in ("pid", "incarnation")):
            return Check(subject, False, f"{name} was pid {old['pid']} and is pid {new.get('pid')}")
        kept.append(f"{place[0]}.{place[1]} pid {old['pid']}")
        if old["executor_pid"] != new["executor_pid"]:
            (recycled if new["restarts"] else renewed).append(name)
        elif new["restarts"]:
            return Check(subject, False, f"the status counts {new['restarts']} restarts of {name}")
    text = ", ".join(kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")
    if recycled:
        text += f"; the executor of {', '.join(recycled)} had crashed with the killed one and was forked anew"
    if renewed:
        text += f"; the executor of {', '.join(renewed)} was renewed with all that it held"
    return Check(subject, True, text)


def _killed_worker(seen: Observed) -> Check:
    subject = "the killed worker was noticed and replaced"
    place = (seen.kill.slice, seen.kill.host)
    losses = [
        event
        for event in seen.events
        if event.get("kind") == "host_lost"
        and (event.get("slice"), event.get("host")) == place
        and event["time"] >= seen.kill.time
    ]
    if not losses:
        return Check(subject, False, "the head has no host_lost event about it")
    new = hosts(seen.after)[place]
    if new["pid"] in (None, seen.kill.pid) or new["state"] != "ready":
        return Check(subject, False, f"its place is {new['state']}, pid {new['pid']}")
    noticed = losses[0]["monotonic"] - seen.kill.monotonic
    cause = losses[0].get("cause", "")
    text = f"pid {seen.kill.pid} killed, noticed after {noticed:.3f} s ({cause}), now pid {new['pid']}"
    return Check(subject, True, text)


def _later_checkpoints(seen: Observed) -> Check:
    subject = "checkpoints are saved again after the recovery"
    last = max((record.step for record in seen.records[: seen.kill.steps_before]), default=-1)
    later = [step for step in seen.committed if step > last]
    if not later:
        return Check(subject, False, f"no checkpoint after step {last} was committed; all: {list(seen.committed)}")
    return Check(subject, True, f"committed: {', '.join(map(str, seen.committed))}")


def _end(seen: Observed) -> Check:
    subject = "training goes on to the end"
    if seen.exit_code != 0:
        return Check(subject, False, f"the controller ended with code {seen.exit_code}")
    if not seen.records or seen.records[-1].step != seen.steps - 1:
        last = seen.records[-1].step if seen.records else None
        return Check(subject, False, f"the last step in the log is {last}, not {seen.steps - 1}")
    rewinds = _rewinds(seen)
    new = seen.steps - 1 - max((rewind.last_step for rewind in rewinds), default=seen.steps)
    if new < NEW_STEPS_WANTED:
        return Check(subject, False, f"only {max(new, 0)} new steps were left after the recovery")
    first, last = (
        statistics.fmean(record.loss for record in part)
        for part in (seen.records[:LOSSES_AVERAGED], seen.records[-LOSSES_AVERAGED:])
    )
    text = (
        f"{new} new steps to step {seen.steps - 1}, exit code 0; mean loss of the first {LOSSES_AVERAGED} steps "
        f"{first:.3f}, of the last {LOSSES_AVERAGED} {last:.3f}"
    )
    return Check(subject, last < first, text)


def _timeline(seen: Observed) -> Check:
    subject = "every second from kill to next step is accounted for"
    mine = [r for r in seen.recoveries if r.session is not None]
    if len(mine) != 1:
        return Check(subject, False, f"the events show {len(mine)} recoveries, not one")
    recovery = mine[0]
    if recovery.outcome != "completed" or recovery.mode != "resume":
        return Check(subject, False, f"the recovery is {recovery.outcome}, mode {recovery.mode}")
    if not recovery.kill_known:
        return Check(subject, False, "it does not begin with the kill")
    total = sum(phase.seconds for phase in recovery.phases)
    if abs(total - recovery.seconds) > ROUNDING_SECONDS:
        return Check(subject, False, f"the phases sum to {total:.3f} s, not {recovery.seconds:.3f} s")
    text = (
        f"{recovery.seconds:.2f} s in {len(recovery.phases)} phases, {recovery.unattributed_seconds:.2f} s unattributed"
    )
    return Check(subject, True, text)


def _nothing_left(seen: Observed) -> Check:
    subject = "nothing is left running"
    if seen.left_running:
        return Check(subject, False, f"processes {list(seen.left_running)} are still there")
    return Check(subject, True, "head, workers, their children and the controller have ended")


def step_times(records: Iterable[jobs.StepRecord]) -> list[tuple[float, float]]:
    """Wall time and number of every step, for the plot."""
    return [(record.logged_at.timestamp(), record.step) for record in records if record.logged_at]


def rates(records: Sequence[jobs.StepRecord], rewind: jobs.Rewind) -> tuple[float | None, float | None]:
    """Median seconds a step before the counter went back, and after."""
    before, after = records[: rewind.index], records[rewind.index :]
    return jobs.median_step_seconds(before), jobs.median_step_seconds(after)
