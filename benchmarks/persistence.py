"""Save and restore a state many times larger than the head may become, and watch the head's memory.

The article's case: a checkpoint of 135 GB against a proxy of 100 GB. Here the head's address space is capped by the
kernel (RLIMIT_AS, set from outside when the cluster is up), workers write and read the state themselves, and the head
must not notice how large it is. For comparison a smaller state goes through an uncapped head, as without persistence.

Run as ``python -m benchmarks.persistence``; results go to ``docs/results/persistence.json`` and ``.md``.
"""

import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import harness
from benchmarks.persistence_program import ARRAY_BYTES
from ridgeway.demo import job as jobs
from ridgeway.launch.environment import command_environment

SHAPE = dataclasses.replace(jobs.SMALL, slices=2, hosts_per_slice=1, devices_per_host=2)
SAMPLE_SECONDS = 0.05
PROGRAM_SECONDS = 1800.0
#: Device state, its copy that is read back, and the pages of the files.
MEMORY_FACTOR, DISK_FACTOR = 3.0, 1.3
PHASES = ("make", "save", "restore", "restore on one slice")


class Watch:
    """Resident memory of processes over time, sampled by a thread."""

    def __init__(self, pids: dict[str, int]):
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            sizes = {name: process.memory_info().rss for name, process in self._processes.items()}
            self.samples.append((time.monotonic(), sizes))

    def stop(self) -> None:
        """Take no more samples."""
        self._end.set()
        self._thread.join()

    def peak(self, name: str, started: float, ended: float) -> int:
        """The largest value in a span of the monotonic clock, or the first one after it."""
        inside = [sizes[name] for at, sizes in self.samples if started <= at <= ended]
        return max(inside or [next(sizes[name] for at, sizes in self.samples if at > ended)])


async def measure(
    name: str, arrays: int, persistence: bool, cap_bytes: int | None, work: Path, say: harness.Say
) -> dict[str, Any]:
    """One run of the program on a cluster of its own, with the head's memory by phase."""
    size = arrays * ARRAY_BYTES
    say(f"{name}: {arrays} arrays, {size / 2**30:.2f} GiB")
    if psutil.virtual_memory().available < size * MEMORY_FACTOR:
        raise harness.BenchmarkError(f"{name} needs {size * MEMORY_FACTOR / 2**30:.0f} GiB of free memory")
    if shutil.disk_usage(work).free < size * DISK_FACTOR:
        raise harness.BenchmarkError(f"{name} needs {size * DISK_FACTOR / 2**30:.0f} GiB of free disk in {work}")
    async with harness.cluster(f"benchmark-{name}", SHAPE, 0, say) as cluster:
        record = cluster.record
        assert record is not None
        head = psutil.Process(record.head_pid)
        before = head.memory_info()
        if cap_bytes is not None:
            head.rlimit(psutil.RLIMIT_AS, (cap_bytes, cap_bytes))
        environment = command_environment(os.environ, "127.0.0.1", record.proxy_port)
        environment |= {"ENABLE_PATHWAYS_PERSISTENCE": "1" if persistence else "0"}
        command = [
            sys.executable, "-m", "benchmarks.persistence_program", "--folder", str(work / name),
            "--arrays", str(arrays),
        ]  # fmt: skip
        watch = Watch({"head": head.pid})
        try:
            output = await harness.output_of(command, environment, work / f"{name}.log", PROGRAM_SECONDS)
        finally:
            watch.stop()
        result = json.loads(output)
        for phase in result["phases"].values():
            phase["head_peak_bytes"] = watch.peak("head", phase.pop("started"), phase.pop("ended"))
        result |= {
            "head_cap_bytes": cap_bytes, "head_before_bytes": before.rss, "head_address_space_before_bytes": before.vms,
            "head_address_space_after_bytes": head.memory_info().vms,
            "head_peak_bytes": max(sizes["head"] for _, sizes in watch.samples),
        }  # fmt: skip
        return result


def describe(result: dict[str, Any]) -> str:
    """The Markdown of a result."""
    lines = [
        "# Persistence: a checkpoint larger than the head", "",
        "Made by `python -m benchmarks.persistence`; see [docs/persistence.md](../persistence.md). 2 slices x 1 host x",
        f"2 devices, {result['machine']['cores']} cores, load average at the start "
        f"{result['machine']['load_average_at_start']}. Times include all that others did on the machine.",
        "Every restore was compared with what was saved by a checksum of every bit.", "",
        "| | workers write and read | everything through the proxy |", "|---|---|---|",
    ]  # fmt: skip
    direct, through = result["persistence"], result["through_proxy"]

    def row(what: str, show: Any) -> None:
        lines.append(f"| {what} | {show(direct)} | {show(through) if through else '–'} |")

    def gib(value: float) -> str:
        return f"{value / 2**30:.2f} GiB"

    def mib(value: float | None) -> str:
        return "none" if value is None else f"{value / 2**20:.0f} MiB"

    row("state", lambda r: gib(r["bytes"]))
    row("head: cap of its address space", lambda r: mib(r["head_cap_bytes"]))
    row("head: resident before the program", lambda r: mib(r["head_before_bytes"]))
    for name in PHASES:
        row(f"head: most while «{name}»", lambda r, name=name: mib(r["phases"][name]["head_peak_bytes"]))
    row("controller: most", lambda r: mib(r["controller_peak_bytes"]))
    for name in PHASES[1:]:
        row(
            name,
            lambda r, name=name: (
                f"{r['phases'][name]['seconds']:.1f} s, {r['bytes'] / 2**20 / r['phases'][name]['seconds']:.0f} MiB/s"
            ),
        )
    row("`save` returned after", lambda r: f"{r['phases']['save']['call_seconds']:.2f} s")
    row(
        "steps done while saving, longest",
        lambda r: f"{r['phases']['save']['steps_meanwhile']}, {r['phases']['save']['longest_step_seconds']:.2f} s",
    )
    row("files", lambda r: f"{r['files']}, {gib(r['bytes_on_disk'])}")
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--gib", default=4.5, show_default=True, help="Size of the state that workers persist.")
@click.option("--through-proxy-gib", default=1.0, show_default=True, help="Of that which goes through; 0 for none.")
@click.option("--head-cap-mib", default=896, show_default=True, help="RLIMIT_AS of the head.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for checkpoints and logs.")
@click.option("--output", type=click.Path(path_type=Path), default=harness.RESULTS / "persistence.json")
def main(gib: float, through_proxy_gib: float, head_cap_mib: int, work: Path | None, output: Path) -> None:
    """Save and restore a state larger than the head may become."""
    say = harness.Say()

    async def measure_all() -> None:
        result: dict[str, Any] = {"machine": harness.machine()}
        with harness.work_folder(work) as folder:
            arrays = max(1, round(gib * 2**30 / ARRAY_BYTES))
            result["persistence"] = await measure("persistence", arrays, True, head_cap_mib << 20, folder, say)
            result["through_proxy"] = None
            if through_proxy_gib > 0:
                arrays = max(1, round(through_proxy_gib * 2**30 / ARRAY_BYTES))
                result["through_proxy"] = await measure("through-proxy", arrays, False, None, folder, say)
        harness.write(result, output)
        text = describe(result)
        output.with_suffix(".md").write_text(text, "utf-8")
        click.echo(text)
        if result["persistence"]["head_peak_bytes"] >= head_cap_mib << 20:
            raise harness.BenchmarkError("the head became larger than its cap")

    harness.run(measure_all)


if __name__ == "__main__":
    main()
