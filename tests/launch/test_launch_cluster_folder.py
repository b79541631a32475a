"""Finding clusters, and telling a running one from what a dead supervisor left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeway.launch import cluster_folder
from ridgeway.launch.cluster_folder import ClusterError, ClusterRecord

HOLD = """
import sys, time
from ridgeway.launch import cluster_folder
folder = cluster_folder.create(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def hold():
    """Starts processes that supervise a cluster of a name."""
    holders = []

    def start(name):
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, name], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        holders.append(holder)
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def record(name="a", **fields) -> ClusterRecord:
    values = {
        "name": name, "secret": "s", "head_host": "127.0.0.1", "cluster_port": 1, "proxy_port": 2,
        "supervisor_pid": os.getpid(), "head_pid": 3, "topology": [3, 1, 2], "started": 0.0, "logs_folder": "/x",
    }  # fmt: skip
    return ClusterRecord(**{**values, **fields})


def test_found_while_it_runs_and_gone_afterwards():
    folder = cluster_folder.create("a")
    with pytest.raises(ClusterError, match="starting or stopping"):
        cluster_folder.find(None)
    folder.write(record())
    assert cluster_folder.find(None) == cluster_folder.find("a") == record()
    assert (folder.path / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert "'s'" not in repr(record())
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
    with pytest.raises(ClusterError, match="no cluster is running"):
        cluster_folder.find(None)


def test_a_name_is_taken_while_its_supervisor_lives(hold):
    holder = hold("a")
    with pytest.raises(ClusterError, match=f"'a' already runs .supervisor pid {holder.pid}."):
        cluster_folder.create("a")
    assert cluster_folder.supervisor_pid("a") == holder.pid
    holder.kill()
    holder.wait()
    assert cluster_folder.supervisor_pid("a") is None
    cluster_folder.create("a").remove()


def test_what_a_dead_supervisor_left_is_removed_by_whoever_looks(hold):
    holder = hold("a")
    other = hold("b")
    assert cluster_folder.running_clusters() == ["a", "b"]
    with pytest.raises(ClusterError, match=r"2 clusters are running .a, b."):
        cluster_folder.choose(None)
    assert cluster_folder.choose("b") == "b"
    holder.kill()
    holder.wait()
    assert cluster_folder.running_clusters() == ["b"]
    assert not (cluster_folder.runtime_root() / "a").exists()
    assert cluster_folder.choose(None) == "b"
    with pytest.raises(ClusterError, match="no cluster named 'a' is running; running: b"):
        cluster_folder.choose("a")
    assert other.poll() is None


def test_a_folder_without_a_lock_or_with_an_unreadable_record_is_stale():
    path = cluster_folder.runtime_root() / "odd"
    path.mkdir()
    (path / "cluster.json").write_text("{")
    assert cluster_folder.read_record(path) is None
    assert cluster_folder.running_clusters() == []
    assert not path.exists()


def test_somebody_who_only_looks_does_not_keep_a_cluster_from_starting():
    """Looking takes the lock for a moment; starting waits for that."""
    import fcntl
    import threading

    path = cluster_folder.runtime_root() / "a"
    path.mkdir()
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    timer = threading.Timer(0.1, os.close, [descriptor])
    timer.start()
    folder = cluster_folder.create("a")
    timer.join()
    folder.remove()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 65, "ü"])
def test_names_that_are_no_folder_names(name):
    with pytest.raises(ClusterError, match="cluster name"):
        cluster_folder.create(name)


def test_a_runtime_root_that_others_may_write_is_refused(tmp_path):
    root = cluster_folder.runtime_root()
    root.chmod(0o755)
    with pytest.raises(ClusterError, match="not a folder of yours alone"):
        cluster_folder.runtime_root()
    root.chmod(0o700)
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(ClusterError, match="not a folder of yours alone"):
        cluster_folder.runtime_root()


def test_logs_of_the_newest_starts_are_kept():
    made = [cluster_folder.create_logs_folder("a", 1_700_000_000.0 + 3600 * n) for n in range(8)]
    made += [cluster_folder.create_logs_folder("a", 1_700_000_000.0 + 3600 * 7) for _ in range(2)]
    assert cluster_folder.logs_folders("a") == made[-5:]
    assert cluster_folder.latest_logs("a") == cluster_folder.latest_logs(None) == made[-1]
    newer = cluster_folder.create_logs_folder("b", 1_800_000_000.0)
    assert cluster_folder.latest_logs(None) == newer
    assert cluster_folder.latest_logs("a") == made[-1]
    with pytest.raises(ClusterError, match="'c' has no logs"):
        cluster_folder.latest_logs("c")


def test_logs_of_one_place_are_in_order_and_its_alone(tmp_path):
    for name in ("worker-1-0.log", "worker-1-0.2.log", "worker-1-0.10.log", "worker-1-01.log", "worker-11-0.log"):
        (tmp_path / name).touch()
    names = [path.name for path in cluster_folder.worker_logs(tmp_path, 1, 0)]
    assert names == ["worker-1-0.log", "worker-1-0.2.log", "worker-1-0.10.log"]
