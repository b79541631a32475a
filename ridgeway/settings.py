"""Every limit and timeout of the runtime, each with its unit in its name.

A value is taken, in this order, from: an explicit keyword, the environment variable
``RIDGEWAY_<NAME IN CAPITALS>``, the default below.  The head sends its settings to every worker
when it joins, so a cluster has one set of them.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Timeouts (seconds), bounds (counts, bytes) of one cluster."""

    heartbeat_interval_seconds: float = 1.0
    """How often an agent and an executor each say that they live."""
    heartbeat_timeout_seconds: float = 10.0
    """Silence of a host after which it is lost (DEADLINE_EXCEEDED)."""
    suspect_after_seconds: float = 3.0
    """Silence of a host after which status and events call it suspect."""
    progress_deadline_seconds: float = 300.0
    """An executor with accepted orders that completes none for so long is lost (DEADLINE_EXCEEDED)."""
    drain_deadline_seconds: float = 1.0
    """After an abort, how long an executor may take to leave its generation before it is recycled."""
    generation_create_timeout_seconds: float = 20.0
    """How long making a generation may take before it counts as failed."""
    membership_settle_seconds: float = 2.0
    """How long a collective's error is held until the loss that caused it is known."""
    disagreement_seconds: float = 0.5
    """After one member of a generation rejects an execution, how long the others may take to reject it too
    before the generation is aborted."""
    executor_aborts_limit: int = 8
    """Aborted generations that an executor leaves before, at a quiet moment, a fresh process goes on with its data."""
    executor_start_timeout_seconds: float = 60.0
    """From an agent's joining to its executor being ready."""
    probe_hold_seconds: float = 10.0
    """How long work that lies wholly on a slice that is on its way back, or that a controller does nothing but wait
    for, is held instead of refused (see `cluster.slice_hold`). 0 refuses at once."""
    probe_retry_seconds: float = 3.0
    """A controller that asks a slice again, so long after a refusal and with no work over several slices in between,
    is waiting for it."""
    replacement_notice_seconds: float = 0.5
    """After a loss, how long a launcher may take to say that a replacement is on its way before work on the slice
    is refused."""
    replacement_expected_seconds: float = 60.0
    """How long an announced replacement is believed to come."""
    preemption_notice_seconds: float = 30.0
    """How long before its end a worker is told of its preemption (SIGTERM): what it holds is saved in that time."""
    suspend_timeout_seconds: float = 300.0
    """How long the saved state of a preempted worker waits for a replacement that takes it over, before it is lost."""
    host_buffer_timeout_seconds: float = 60.0
    """How long a request waits for the host buffer it names while no host buffer of its session gets on."""
    transfer_timeout_seconds: float = 120.0
    """How long an executor waits for bytes that another executor sends it."""
    persistence_timeout_seconds: float = 3600.0
    """How long a request to write or read arrays may take that does not say it itself."""
    persistence_threads: int = 4
    """How many shards one executor writes to storage or reads from it at a time."""
    persistence_chunk_bytes: int = 64 << 20
    """About the largest file of an array that executors write to storage."""
    plugin_connect_seconds: float = 10.0
    """How long a compilation that asks the controller's Python waits for the plugin there to connect."""
    callback_timeout_seconds: float = 3600.0
    """How long a program waits for the controller to run a host callback."""
    python_call_timeout_seconds: float = 3600.0
    """One call of a colocated Python function on one host; when it is over the Python process there is killed."""
    python_drop_deadline_seconds: float = 30.0
    """How long calls of colocated Python wait for the end of objects that were dropped before."""
    compile_timeout_seconds: float = 1800.0
    """One compilation."""
    compiler_idle_seconds: float = 2.0
    """After so long without a compilation a compiler lets go of what it compiles with (threads, memory)."""
    compile_attempts: int = 3
    """How often a program is compiled again after the compiler process died, before it is called a bug."""
    program_crash_limit: int = 3
    """How often an executor may crash in a program before that is called a bug and refused."""
    program_crash_window_seconds: float = 3600.0
    """How long a crash counts, and a refusal lasts."""
    loss_explanation_seconds: float = 0.2
    """How long the answer to the client waits for the agent to say how a lost executor ended."""
    handshake_timeout_seconds: float = 5.0
    """Authentication and hello of a new connection to the head."""
    head_pause_seconds: float = 120.0
    """How long a worker waits for a head that says nothing while its host still acknowledges what it is sent: its
    process was stopped, or is starved. If its host is silent too, `heartbeat_timeout_seconds` counts."""
    orphan_policy: str = "exit"
    """What a worker does when the head is gone: ``exit``, or ``wait`` for another head at the same address."""
    orphan_timeout_seconds: float = 60.0
    """With the policy ``wait``: how long."""
    link_buffer_limit_bytes: int = 256 << 20
    """Bytes given to one executor that it has not got to, above which a session that gives it more is made to wait."""
    queued_order_limit: int = 10_000
    """The same for orders, such as steps of a program that never waits for a result."""
    pending_order_limit: int = 10_000
    """Orders kept for a slice that is on its way back."""
    session_response_limit: int = 100_000
    """Responses a session may leave unread before it is ended."""
    request_limit_bytes: int = 2 << 30
    """The largest message accepted from a client."""
    host_buffer_limit_bytes: int = 1 << 30
    """Bytes of host buffers that may wait on the head for one session, in each direction, before it is made to wait."""
    upload_window_bytes: int = 64 << 20
    """Host buffers that one session sends to the head at a time; a larger one comes alone."""
    large_transfer_folder: str = ""
    """Where a client on the head's machine leaves large host buffers as files; empty: what the client's own variable
    ``IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY`` says in the head's environment."""
    compile_cache_limit_bytes: int = 4 << 30
    """Size of the persistent compile cache."""
    goodput_report_seconds: float = 10.0
    """How often it is recorded what a session's time was spent on (event `goodput`), if that has changed."""
    event_limit: int = 100_000
    """Events kept in the head's memory (all of them go to the event file)."""
    profile_limit_seconds: float = 600.0
    """How long an executor records a profile that nobody stops."""
    profile_stop_seconds: float = 60.0
    """How long the head waits for the executors' traces when a profile is stopped."""
    profile_limit_bytes: int = 256 << 20
    """The largest trace that an executor sends."""
    profile_total_limit_bytes: int = 1 << 30
    """All executors' traces of one profile, which the head holds until they are fetched."""
    profile_request_limit: int = 200_000
    """Requests and events shown in the proxy's part of a profile."""
    spare_rendezvous_services: int = 2
    """Key-value services kept ready for the next generations."""
    slices_shown: str = "all"
    """What programs see as `slice_index`: ``all``, the slices as they are, which elastic training needs; ``one``, every
    device in slice 0, for programs written for one slice (`jax.make_mesh` refuses several). Slices still fail and
    return by themselves."""
    device_memory_limit_bytes: int = 0
    """Memory of one CPU device as shown by `status`; 0: an equal part of the host's."""

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping, as it is sent to workers."""
        return dataclasses.asdict(self)


def load_settings(overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from defaults, environment and explicit overrides.

    Raises:
      ValueError: a name is unknown or a value does not have the type of its setting; the message names it.
    """
    environment = os.environ if environment is None else environment
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    for name in fields:
        text = environment.get(f"RIDGEWAY_{name.upper()}")
        if text is not None:
            values[name] = text
    for name, value in (overrides or {}).items():
        if name not in fields:
            raise ValueError(f"unknown setting {name!r}; known: {', '.join(sorted(fields))}")
        if value is not None:
            values[name] = value
    return Settings(**{name: _convert(name, value, fields[name].default) for name, value in values.items()})


_CHOICES = {"orphan_policy": ("exit", "wait"), "slices_shown": ("all", "one")}


def _convert(name: str, value: Any, default: Any) -> Any:
    kind = type(default)
    try:
        converted = kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"setting {name} = {value!r} is not a {kind.__name__}") from None
    if kind in (int, float) and converted < 0:
        raise ValueError(f"setting {name} = {value!r} is negative")
    choices = _CHOICES.get(name)
    if choices is not None and converted not in choices:
        raise ValueError(f"setting {name} = {value!r} is neither {choices[0]!r} nor {choices[1]!r}")
    return converted
