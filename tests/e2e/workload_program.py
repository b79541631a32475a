"""pathwaysutils' training workload with a snapshot a step, under its elastic manager; then once more, undisturbed.

Says each step of the first run as it is done, and at the end both runs' losses.
"""

import json

import orbax.checkpoint as ocp
import pathwaysutils
from pathwaysutils.elastic.manager import Manager
from pathwaysutils.extras.simple_model.config import ModelConfig
from pathwaysutils.extras.simple_model.workload import Workload

STEPS = 12
SMALL = ModelConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_heads=2, head_dim=16, num_layers=1)


def main() -> None:
    pathwaysutils.initialize()
    manager = Manager()
    snapshotter = ocp.v1.training.pathways.Snapshotter()
    losses: dict[int, float] = {}

    def workload(period: int) -> Workload:
        made = Workload(
            config=SMALL, elastic_manager=manager, total_steps=STEPS, snapshot_interval=period,
            snapshotter=snapshotter if period else None,
        )  # fmt: skip
        made.initialize()
        return made

    def train() -> None:
        training = workload(1)
        latest = snapshotter.latest
        if latest is not None:
            training.restore_from_snapshot()
            training.step = latest.step + 1
            print(f"restored step {latest.step}", flush=True)
        while training.step <= STEPS:
            step = training.step
            losses[step] = training.run_step()
            print(f"step {step}", flush=True)
            snapshotter.join()
        training.close()

    manager.elastic_retry(timeout=300)(train)()
    print(json.dumps({"losses": list(losses.values()), "undisturbed": workload(0).run()}), flush=True)


if __name__ == "__main__":
    main()
