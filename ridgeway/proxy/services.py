"""What all sessions of a proxy share."""

import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ridgeway.cluster.resource_manager import ResourceManager
from ridgeway.proxy.dispatch import Dispatcher
from ridgeway.proxy.host_callbacks import HostCallbackRegistry
from ridgeway.proxy.profiling import Profiler, Subscribe
from ridgeway.proxy.programs import Programs
from ridgeway.proxy.recovery_observer import RecoveryObserver
from ridgeway.settings import Settings

if TYPE_CHECKING:
    from ridgeway.proxy.session import Session

Handler = Callable[["Session", Any, Any, Callable[[Any], None]], Any]


class Services:
    """The manager, dispatcher, programs, and one handler per request kind."""

    def __init__(
        self,
        manager: ResourceManager,
        programs: Programs,
        settings: Settings,
        emit: Callable[..., Any],
        subscribe: Subscribe,
        versions: dict[str, str],
    ):
        self.manager = manager
        self.programs = programs
        self.settings = settings
        self.emit = emit
        self.versions = versions
        self.dispatcher = Dispatcher(manager, programs)
        self.observer = RecoveryObserver(manager, emit, settings.goodput_report_seconds)
        self.callbacks = HostCallbackRegistry(settings.plugin_connect_seconds)
        self.profiler = Profiler(manager, settings, emit, subscribe)
        manager.on_host_callback = self.callbacks.called
        self.handlers: dict[str, Handler] = {}
        self.sessions: dict[int, Session] = {}
        manager.on_generation.append(programs.preload)
        manager.suspender.on_change.append(self._reopen_gates)
        manager.suspender.busy.append(lambda slot: any(s.python.is_busy(slot) for s in self.sessions.values()))
        manager.on_loss.append(lambda executor: self.observer.lost(list(self.sessions.values()), executor))

    def _reopen_gates(self) -> None:
        for session in list(self.sessions.values()):
            session.gate.reopen()

    def report_bug(self, where: str, error: BaseException) -> None:
        """Something broke that must not: keep the traceback for whoever reads the head's log."""
        print(f"ridgeway head: bug at {where}: {error!r}", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()

    def session_ended(self, session: "Session", reason: str, arrays: int) -> None:
        """A session is over."""
        self.sessions.pop(session.number, None)
        self.observer.session_ended(session)
        self.callbacks.session_ended(session.number)
        self.emit("session_ended", session=session.number, reason=reason, arrays=arrays)
