"""Where a cluster is found on this machine, and where it leaves its logs.

The runtime folder ``${XDG_RUNTIME_DIR:-/tmp}/ridgeway-<uid>/<name>/`` (mode 0700) exists while a cluster
runs.  Its supervisor holds a lock on ``lock`` in it for as long as it lives, so a folder whose lock is free
is what a killed supervisor left, and is removed by whoever finds it.  ``cluster.json`` (mode 0600: it has
the secret) says how to reach the cluster; it is there once the head serves.

Logs and events are in ``${XDG_STATE_HOME:-~/.local/state}/ridgeway/<name>/<start time>/`` and outlive the
cluster; the newest `KEPT_STARTS` are kept.
"""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

KEPT_STARTS = 5
LOCK_ATTEMPTS = 10
LOCK_RETRY_SECONDS = 0.05
DEFAULT_NAME = "ridgeway"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CLUSTER_FILE = "cluster.json"
_LOCK_FILE = "lock"
_SCRATCH_FOLDER = "scratch"


class ClusterError(Exception):
    """A cluster that is not there, is there already, or cannot be told; the message is for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The content of ``cluster.json``."""

    name: str
    secret: str = dataclasses.field(repr=False)
    head_host: str
    cluster_port: int
    proxy_port: int
    supervisor_pid: int
    head_pid: int
    topology: list[int]
    """Slices, hosts per slice, devices per host."""
    started: float
    """Wall clock, seconds."""
    logs_folder: str
    command: list[str] | None = None
    """What `ridgeway run` runs; None for `ridgeway up` and `ridgeway head`."""

    @property
    def proxy_address(self) -> str:
        """``127.0.0.1:29000``, for programs on this machine."""
        return f"127.0.0.1:{self.proxy_port}"


def check_name(name: str) -> str:
    """``name`` itself.

    Raises:
      ClusterError: it cannot be the name of a folder.
    """
    if not _NAME.fullmatch(name):
        raise ClusterError(
            f"cluster name {name!r} is not made of letters, digits, '.', '_' and '-' (at most 64, a letter "
            "or digit first)"
        )
    return name


def runtime_root() -> Path:
    """The folder of this user's running clusters; made if missing.

    Raises:
      ClusterError: the folder is somebody else's or others may write to it.
    """
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"ridgeway-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise ClusterError(f"cannot make the runtime folder {root}: {error.strerror}; set XDG_RUNTIME_DIR") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ClusterError(
            f"the runtime folder {root} is not a folder of yours alone (mode 0700); remove it or set XDG_RUNTIME_DIR"
        )
    return root


def state_root() -> Path:
    """The folder of all clusters' logs; it need not exist."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ridgeway"


class ClusterFolder:
    """The runtime folder of a cluster that this process supervises."""

    def __init__(self, name: str, path: Path, lock_descriptor: int):
        self.name = name
        self.path = path
        self._lock_descriptor: int | None = lock_descriptor

    def write(self, record: ClusterRecord) -> None:
        """Say how to reach the cluster."""
        temporary = self.path / f".{_CLUSTER_FILE}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(record), file, indent=1)
        temporary.rename(self.path / _CLUSTER_FILE)

    def remove(self) -> None:
        """The cluster is down."""
        if self._lock_descriptor is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_descriptor)
        self._lock_descriptor = None


def already_running(name: str) -> ClusterError:
    """What to say when a name is taken."""
    pid = supervisor_pid(name)
    by = f" (supervisor pid {pid})" if pid is not None else ""
    return ClusterError(
        f"a cluster named {name!r} already runs{by}; stop it with `ridgeway down --cluster {name}`, or give this "
        "one another name and ports (--cluster NAME --proxy-port 0 --cluster-port 0)"
    )


def create(name: str) -> ClusterFolder:
    """Take a name for a cluster that this process starts.

    Raises:
      ClusterError: a cluster of that name runs.
    """
    path = runtime_root() / check_name(name)
    # More than one turn only if another command looks whether the folder is stale: it holds the lock for a
    # moment and may remove the folder.
    for turn in range(LOCK_ATTEMPTS):
        if turn:
            time.sleep(LOCK_RETRY_SECONDS)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            descriptor = _try_lock(path)
        except FileNotFoundError:
            continue
        if descriptor is None:
            if turn < LOCK_ATTEMPTS - 1:
                continue
            raise already_running(name)
        if _is_current(path, descriptor):
            (path / _CLUSTER_FILE).unlink(missing_ok=True)
            os.pwrite(descriptor, f"{os.getpid():<12}\n".encode(), 0)
            return ClusterFolder(name, path, descriptor)
        os.close(descriptor)
    raise ClusterError(f"cannot lock the runtime folder {path}: somebody else keeps removing it")


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None if its supervisor lives.

    Raises:
      FileNotFoundError: the folder is gone.
    """
    descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _is_current(path: Path, descriptor: int) -> bool:
    """Whether the locked file is still the one in the folder (and not one just removed)."""
    try:
        return os.fstat(descriptor).st_ino == (path / _LOCK_FILE).stat().st_ino
    except FileNotFoundError:
        return False


def read_record(path: Path) -> ClusterRecord | None:
    """What a runtime folder says; None if it does not yet."""
    try:
        content: dict[str, Any] = json.loads((path / _CLUSTER_FILE).read_text())
        return ClusterRecord(**content)
    except (OSError, ValueError, TypeError):
        return None


def supervisor_pid(name: str) -> int | None:
    """The process that supervises a running cluster, also one that is only starting; None if none does."""
    path = runtime_root() / check_name(name)
    if not path.is_dir() or not is_running(path):
        return None
    try:
        return int((path / _LOCK_FILE).read_text())
    except (OSError, ValueError):
        return None


def is_running(path: Path) -> bool:
    """Whether a folder's supervisor lives. A folder whose supervisor has died is removed."""
    try:
        descriptor = _try_lock(path)
    except OSError:
        return False
    if descriptor is None:
        return True
    if _is_current(path, descriptor):
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
    return False


def running_clusters() -> list[str]:
    """Names of the clusters that run (or are starting); what dead supervisors left is removed."""
    root = runtime_root()
    return sorted(path.name for path in root.iterdir() if path.is_dir() and is_running(path))


def choose(name: str | None) -> str:
    """The cluster that a command means: the one named, or else the only one that runs.

    Raises:
      ClusterError: there is none, or there are several and none is named.
    """
    running = running_clusters()
    if name is not None:
        if check_name(name) in running:
            return name
        others = f"; running: {', '.join(running)}" if running else ", nor any other"
        raise ClusterError(f"no cluster named {name!r} is running{others}")
    if not running:
        raise ClusterError("no cluster is running; start one with `ridgeway up` or `ridgeway run`")
    if len(running) > 1:
        raise ClusterError(f"{len(running)} clusters are running ({', '.join(running)}); choose with --cluster NAME")
    return running[0]


def find(name: str | None) -> ClusterRecord:
    """How to reach the cluster that a command means.

    Raises:
      ClusterError: see `choose`; or its head does not serve yet.
    """
    chosen = choose(name)
    record = read_record(runtime_root() / chosen)
    if record is None:
        raise ClusterError(f"cluster {chosen!r} is starting or stopping: its head does not serve; try again")
    return record


def create_logs_folder(name: str, started: float) -> Path:
    """A new folder for the logs of one start; older ones than the newest `KEPT_STARTS` are removed.

    Raises:
      ClusterError: it cannot be made.
    """
    parent = state_root() / check_name(name)
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(started))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1000):
            # Starts within one second get -1, -2...; both sort in order.
            folder = parent / (stamp if number == 0 else f"{stamp}-{number:03d}")
            try:
                folder.mkdir(mode=0o700)
                break
            except FileExistsError:
                continue
        else:
            raise ClusterError(f"cannot make a logs folder in {parent}: a thousand starts in one second")
    except OSError as error:
        raise ClusterError(f"cannot make the logs folder in {parent}: {error.strerror}; set XDG_STATE_HOME") from None
    for old in logs_folders(name)[:-KEPT_STARTS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def create_scratch_folder(name: str, parent: Path | None, logs: Path) -> Path:
    """A new folder (mode 0700) for the state of preempted workers, in ``parent`` or else beside the logs. It is the
    cluster's own and goes with it; what a killed supervisor left beside its logs goes with the next start.

    Raises:
      ClusterError: it cannot be made.
    """
    if parent is None:
        for old in logs_folders(name):
            if old != logs:
                shutil.rmtree(old / _SCRATCH_FOLDER, ignore_errors=True)
    folder = logs / _SCRATCH_FOLDER
    try:
        if parent is None:
            folder.mkdir(mode=0o700)
        else:
            folder = Path(tempfile.mkdtemp(prefix=f"ridgeway-{check_name(name)}-", dir=parent.resolve()))
    except OSError as error:
        problem = f"cannot make the scratch folder in {parent or logs}: {error.strerror}"
        raise ClusterError(f"{problem}; name a folder that you may write to with --scratch-folder") from None
    return folder


def logs_folders(name: str) -> list[Path]:
    """The logs folders of a cluster's starts, the oldest first."""
    parent = state_root() / name
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir())


def latest_logs(name: str | None) -> Path:
    """The logs folder a command means: of the running cluster; or else of the last start of the cluster
    named, or of any.

    Raises:
      ClusterError: there is none, or several clusters run and none is named.
    """
    running = running_clusters()
    if name is not None or running:
        chosen = check_name(name) if name is not None else choose(None)
        record = read_record(runtime_root() / chosen) if chosen in running else None
        folders = [Path(record.logs_folder)] if record is not None else logs_folders(chosen)
        if not folders:
            raise ClusterError(f"cluster {chosen!r} has no logs in {state_root()}: it was never started here")
        return folders[-1]
    root = state_root()
    names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    folders = [folder for found in names for folder in logs_folders(found)]
    if not folders:
        raise ClusterError(f"there are no logs in {root}: no cluster was started here yet")
    return max(folders, key=lambda folder: (folder.name, folder.stat().st_mtime))


def worker_logs(folder: Path, slice_index: int, host_index: int) -> list[Path]:
    """The logs of the processes that had a slot, the first one first: ``worker-S-H.log``,
    ``worker-S-H.2.log``...; one that began as a standby is a link to ``standby-N.log``."""
    prefix = f"worker-{slice_index}-{host_index}."

    def number(path: Path) -> int:
        middle = path.name.removeprefix(prefix).removesuffix("log").rstrip(".")
        return int(middle) if middle.isdecimal() else 1

    return sorted(folder.glob(f"{prefix}*log"), key=number)
