"""`ridgeway chaos`: break a running cluster again and again, from a seed."""

import secrets
from pathlib import Path

import click

from ridgeway.chaos.plan import PROGRAMS_OWN, Kind, Moment
from ridgeway.cli import options


def _names(kinds: type[Kind] | type[Moment], text: str | None, what: str) -> list[str] | None:
    """The names in a list with commas.

    Raises:
      click.UsageError: one is unknown.
    """
    if text is None:
        return None
    known = [kind.value for kind in kinds]
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in known:
            raise click.UsageError(f"{name!r} is no {what}; known: {', '.join(known)}")
    if not found:
        raise click.UsageError(f"names no {what}; known: {', '.join(known)}")
    return found


@click.command(short_help="Break a cluster of this machine again and again, from a seed.")
@options.cluster_name
@click.option(
    "--mtbf-seconds", type=click.FloatRange(0.0), default=60.0, show_default=True, metavar="N",
    help="Mean time between faults; those that hit a recovery follow at once.",
)  # fmt: skip
@click.option("--seed", type=int, metavar="N", help="Gives the same faults again.  [default: a new one, printed]")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after so many faults.")
@click.option("--seconds", type=click.FloatRange(0.0), metavar="N", help="End after so long.")
@click.option("--faults", metavar="A,B", help="Only these.  [default: all that this cluster can suffer]")
@click.option("--moments", metavar="A,B", help="Only at these.  [default: all that the head knows of]")
@click.option(
    "--disk", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
    help="A folder on a small file system of its own, for full-disk.",
)  # fmt: skip
@click.option("--show", is_flag=True, help="Only show the plan (--count faults of it, or 20).")
def chaos(
    name: str | None, mtbf_seconds: float, seed: int | None, count: int | None, seconds: float | None,
    faults: str | None, moments: str | None, disk: Path | None, show: bool,
) -> int:  # fmt: skip
    """Break a cluster of this machine again and again, from a seed, until Ctrl-C, --count or --seconds.

    \b
    ridgeway chaos --mtbf-seconds 60                          whatever may happen
    ridgeway chaos --faults kill-agent --count 10 --seed 4    ten killed workers
    """
    from itertools import islice

    from ridgeway.chaos import injection, plan, run
    from ridgeway.launch import cluster_folder, control
    from ridgeway.launch.daemon import print_line
    from ridgeway.settings import load_settings

    wanted = _names(Kind, faults, "fault")
    when = _names(Moment, moments, "moment")
    chosen_moments = {Moment(m) for m in when} if when is not None else set(Moment) - PROGRAMS_OWN
    if unknown := chosen_moments & PROGRAMS_OWN:
        raise click.UsageError(f"the head does not know when a program is at {sorted(unknown)[0].value!r}")
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    record = cluster_folder.find(name)
    shape = plan.Shape(*record.topology[:2])
    with run.links(record) as (client, events):
        silence = client.request("status").get("heartbeat_timeout_seconds", load_settings().heartbeat_timeout_seconds)
        injector = injection.Injector(record, client, disk)
        able = injector.kinds()
        kinds = {Kind(w) for w in wanted} if wanted is not None else able
        if missing := kinds - able:
            why = "name a --disk" if Kind.FULL_DISK in missing else "its workers have no network namespaces"
            raise click.UsageError(f"{sorted(missing)[0].value!r} cannot be done to this cluster: {why}")
        try:
            planned = plan.plan(seed, shape, mtbf_seconds, silence, kinds, chosen_moments)
            if show:
                for fault in islice(planned, count or 20):
                    click.echo(f"after {fault.pause_seconds:.1f} s, {fault.describe()}")
                return 0
            print_line(f"seed {seed}: {', '.join(sorted(kind.value for kind in kinds))}")
            done = run.chaos(injector, events, planned, count, seconds, print_line)
        except control.ControlError as error:
            if not events.over:
                raise
            raise control.ControlError(f"the cluster ended under chaos of seed {seed}: {error}") from None
    print_line(f"{len(done)} faults done (seed {seed})")
    return 0
