"""What the head's events are called in plain language, and what they mean for the replacement policy."""

from typing import Any

from ridgeway.launch import supervision

Event = dict[str, Any]


def _place(event: Event) -> str:
    return f"slice {event['slice']} host {event['host']}"


def narrate(event: Event) -> str | None:
    """A line about an event; None for one that is not worth a line."""
    match event.get("kind"):
        case "host_suspect":
            return f"{_place(event)} has been silent for {event['silent_seconds']:.1f} s"
        case "host_lost" if event.get("executor_only"):
            return f"executor of {_place(event)} is lost: {event['cause']}; its agent starts another one"
        case "host_lost":
            return f"{_place(event)} is lost: {event['cause']}"
        case "preemption_announced":
            return f"{_place(event)} will be taken away in {event['notice_seconds']:g} s ({event['reason']})"
        case "host_suspended":
            size = event["bytes"] / 1e6
            return f"{_place(event)} is suspended: {size:.1f} MB saved in {event['seconds']:.2f} s, waiting for another"
        case "host_resumed":
            return f"{_place(event)} is back as it was, {event['seconds']:.2f} s after its preemption was announced"
        case "slice_lost":
            return f"slice {event['slice']} is down"
        case "slice_ready":
            return f"slice {event['slice']} is ready"
        case "standby_ready":
            return "a standby is ready"
        case "generation_ready":
            members = event["members"]
            slices = ", ".join(str(index) for index in sorted({member[0] for member in members}))
            hosts = "1 host" if len(members) == 1 else f"{len(members)} hosts"
            seconds = event.get("seconds") or 0.0
            return f"generation {event['generation']} of {hosts} (slices {slices}) made in {seconds:.2f} s"
        case "compilers_differ":
            return (
                "the hosts' CPUs or XLA flags differ, and a program compiled on one may not run on another "
                f"({event['environment']} beside {', '.join(event['others'])})"
            )
        case "session_started":
            return f"a program has connected (session {event['session']})"
        case "session_ended":
            return f"session {event['session']} has ended: {event.get('reason', '')}"
        case "recovery_completed":
            return f"session {event['session']} is at work again, {event['seconds']:.2f} s after the loss"
    return None


def to_policy(event: Event) -> supervision.Event | None:
    """The event as the replacement policy sees it; None for one that does not concern it."""
    match event:
        case {
            "kind": "host_joining",
            "slice": int(slice_index),
            "host": int(host_index),
            "incarnation": int(incarnation),
            "launch_id": str(launch_id),
        }:
            return supervision.HostJoining(slice_index, host_index, incarnation, launch_id)
        case {
            "kind": "host_ready",
            "slice": int(slice_index),
            "host": int(host_index),
            "incarnation": int(incarnation),
        }:
            return supervision.HostReady(slice_index, host_index, incarnation)
        case {
            "kind": "host_lost",
            "slice": int(slice_index),
            "host": int(host_index),
            "incarnation": int(incarnation),
        } if not event.get("executor_only"):
            silent = event.get("code") == "DEADLINE_EXCEEDED"
            return supervision.HostLost(slice_index, host_index, incarnation, silent)
        case {
            "kind": "preemption_announced",
            "slice": int(slice_index),
            "host": int(host_index),
            "incarnation": int(incarnation),
            "notice_seconds": float() | int() as notice,
        }:
            return supervision.HostPreempted(slice_index, host_index, incarnation, notice)
        case {"kind": "standby_ready", "launch_id": str(launch_id)}:
            return supervision.StandbyReady(launch_id)
        case {"kind": "standby_lost", "launch_id": str(launch_id)}:
            return supervision.StandbyLost(launch_id)
    return None
