"""Fixtures of the end-to-end tests: places of their own, and one cluster that most tests share."""

import contextlib
import importlib.metadata
import signal
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import e2e_harness as harness
import pytest
from e2e_harness import Cluster, Controller, Place


@pytest.fixture(scope="session", autouse=True)
def ended_in_order() -> Iterator[None]:
    """SIGTERM, as continuous integration sends it, ends the tests as Ctrl-C does: with every cluster taken down."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place of its own."""
    with harness.place_in(tmp_path) as made:
        yield made


class SharedCluster:
    """The cluster that tests share; made when first asked for, and again if a failed test has spoilt it."""

    def __init__(self, folder: Path, topology: str, *options: str):
        self._folder = folder
        self._topology = topology
        self._options = options
        self._made: Cluster | None = None
        self._count = 0

    def get(self) -> Cluster:
        """The cluster, whole."""
        if self._made is None:
            self._count += 1
            folder = self._folder / str(self._count)
            folder.mkdir()
            place = Place(folder)
            try:
                self._made = harness.bring_up(place, self._topology, *self._options)
            except BaseException:
                place.end()
                raise
        return self._made

    def give_up(self) -> None:
        """It is not what it should be: the next test gets another one."""
        if self._made is not None:
            self._made.close()
            self._made.place.end()
            self._made = None

    def down(self) -> None:
        """Take it down; nothing may be left."""
        if self._made is not None:
            try:
                harness.take_down(self._made)
            finally:
                self._made.place.end()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """Three slices of one host with two devices, nothing held in reserve."""
    shared = SharedCluster(tmp_path_factory.mktemp("shared"), "3x1x2", "--max-slice-restarts", "unlimited")
    yield shared
    shared.down()


@pytest.fixture
def cluster(shared_cluster: SharedCluster) -> Iterator[Cluster]:
    """The shared cluster, whole and without a session, as the test must leave it too."""
    found = shared_cluster.get()
    spoilt = True
    try:
        yield found
        found.wait_sessions(0)
        found.wait_whole()
        spoilt = False
    finally:
        if spoilt:
            shared_cluster.give_up()


@pytest.fixture
def controller(cluster: Cluster) -> Iterator[Controller]:
    """A program that is connected to the shared cluster."""
    with contextlib.closing(cluster.controller()) as made:
        yield made


@pytest.fixture(scope="session")
def native_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses by step of the plain trainer on three native processes with two devices each."""
    with harness.place_in(tmp_path_factory.mktemp("native")) as place:
        runs = harness.train_natively(place, place.folder / "checkpoints", 3, 2)
        for run in runs:
            assert run.wait() == 0, run.describe()
        found = [harness.losses(run.output) for run in runs]
    assert list(found[0]) == list(range(harness.TRAINING_STEPS))
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A value of PYTHONPATH with which jax finds the plugin, also when Ridgeway is not installed but only there."""
    path = [str(harness.ROOT)]
    if not any(found.value == "ridgeway.client" for found in importlib.metadata.entry_points(group="jax_plugins")):
        installed = tmp_path_factory.mktemp("installed")
        info = installed / "ridgeway-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ridgeway\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[jax_plugins]\nridgeway = ridgeway.client\n")
        path.append(str(installed))
    return ":".join(path)


@pytest.fixture(scope="session")
def python_without_plugin(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A Python, and its PYTHONPATH, that has everything installed but Ridgeway: what a stock client has."""
    folder = tmp_path_factory.mktemp("stock")
    packages = folder / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "ridgeway" not in entry.name.lower():
            (packages / entry.name).symlink_to(entry)
    venv.create(folder / "python", symlinks=True)
    return str(folder / "python" / "bin" / "python"), str(packages)
