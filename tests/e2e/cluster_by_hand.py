"""A head and workers that a test starts itself, as a scheduler would: it decides which host comes back, and when."""

import signal
import socket

from e2e_harness import Cluster, Host, Place, Running

SECRET = "an end-to-end test's secret"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ClusterByHand:
    """Slices of one host with two devices each; nobody replaces a worker but the test."""

    def __init__(self, place: Place, slices: int, *settings: str):
        self._place = place
        self._port = free_port()
        self.head = place.ridgeway(
            "head", "--topology", f"{slices}x1x2", "--cluster-port", str(self._port), "--proxy-port", "0",
            *(f"--set={setting}" for setting in settings), RIDGEWAY_CLUSTER_SECRET=SECRET,
        )  # fmt: skip
        self.head.says(f"waiting for {slices} workers")
        self.cluster = Cluster(place, place.record())
        self.workers: dict[int, Running] = {}
        for slice_index in range(slices):
            self.start_worker(slice_index)

    def start_worker(self, slice_index: int) -> Running:
        """A worker for a slice; it joins when it can."""
        worker = self._place.ridgeway(
            "worker", "--head", f"127.0.0.1:{self._port}", "--slice", str(slice_index), "--host", "0",
            RIDGEWAY_CLUSTER_SECRET=SECRET,
        )  # fmt: skip
        self.workers[slice_index] = worker
        return worker

    def lose(self, slice_index: int) -> Host:
        """SIGKILL a slice's worker; returns once the head knows. Nothing takes its place."""
        since = self.cluster.now()
        host = self.cluster.kill_worker(slice_index)
        self.cluster.wait_event(since, "host_lost", slice=slice_index)
        assert self.workers.pop(slice_index).wait() == -signal.SIGKILL
        return host

    def end(self) -> None:
        """Stop the head, and with it everything."""
        self._place.note_ports()
        self.cluster.close()
        self.head.process.send_signal(signal.SIGTERM)
        assert self.head.wait() == 0, self.head.describe()
        for worker in self.workers.values():
            assert worker.wait() == 0, worker.describe()
        self._place.assert_nothing_left()
