"""`ridgeway preempt`: have a worker leave with notice, its state kept for its replacement."""

import time
from typing import Any

import click

from ridgeway.cli import options
from ridgeway.cli.kill import parse_target

EXIT_FAILED = 1
#: How much longer than the notice to wait for the outcome.
MARGIN_SECONDS = 10.0


@click.command(short_help="Have a worker leave with notice.")
@options.cluster_name
@click.argument("where", metavar="slice=S[,host=H]")
@click.option(
    "--notice-seconds", type=click.FloatRange(0.0), metavar="N",
    help="How long it has.  [default: the setting preemption_notice_seconds]",
)  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Return at once instead of saying what has become of it.")
def preempt(name: str | None, where: str, notice_seconds: float | None, no_wait: bool) -> int:
    """Announce that a worker will be taken away, as SIGTERM to it does.

    What it holds is saved within the notice, it leaves, and its replacement gets all of it back: programs see a
    pause.  If that cannot be done in time it becomes an ordinary loss, and the exit code is 1.

    \b
    ridgeway preempt slice=1 --notice-seconds 30
    """
    from ridgeway.launch import cluster_folder, control
    from ridgeway.launch.daemon import print_line

    slice_index, host_index = parse_target(where)
    arguments: dict[str, Any] = {"slice": slice_index, "host": host_index, "notice_seconds": notice_seconds}
    with control.connect(cluster_folder.find(name)) as client:
        since = _next_event(client)
        answer = client.request("preempt", **arguments, reason="ridgeway preempt")
        for s, h in answer["hosts"]:
            print_line(f"slice {s} host {h} leaves within {answer['notice_seconds']:g} s")
        if no_wait:
            return 0
        missing = {tuple(host) for host in answer["hosts"]}
        failed = False
        wait_seconds = answer["notice_seconds"] + MARGIN_SECONDS
        end = time.monotonic() + wait_seconds
        for event in client.follow(since, wait_seconds):
            host = (event.get("slice"), event.get("host"))
            if host not in missing:
                if time.monotonic() > end:
                    break
                continue
            place = f"slice {host[0]} host {host[1]}"
            if event["kind"] == "host_suspended":
                size = event["bytes"] / 1e6
                print_line(f"{place} is suspended: {size:.1f} MB saved in {event['seconds']:.2f} s")
            elif event["kind"] == "host_lost":
                print_line(f"{place} is lost: {event['cause']}")
                failed = True
            elif event["kind"] == "host_joining":
                print_line(f"{place} was not in use yet, and is replaced")
            else:
                continue
            missing.remove(host)
            if not missing:
                break
    for s, h in sorted(missing):
        print_line(f"what has become of slice {s} host {h} is not known; see `ridgeway events`")
    return EXIT_FAILED if failed or missing else 0


def _next_event(client: Any) -> int:
    """The number that the next event will have."""
    since = 0
    while True:
        answer = client.request("events", since=since)
        if not answer["events"]:
            return answer["next"]
        since = answer["next"]
