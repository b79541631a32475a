"""The cluster of a soak in a process of its own, up until standard input ends; with ``--separate`` every host of it is
a network namespace. Says ``{"up": name}`` once it is whole."""

import argparse
import asyncio
import json
import sys

from benchmarks.soak_network import Switch
from ridgeway.launch import checks
from ridgeway.launch.local import LocalCluster, LocalOptions


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def run(options: argparse.Namespace) -> None:
    topology = checks.parse_topology(options.topology)
    switch = Switch(topology.slots) if options.separate else None
    cluster: LocalCluster | None = None
    try:
        if switch is not None:
            switch.make()
        cluster = LocalCluster(
            LocalOptions(
                name=options.name,
                topology=topology,
                standbys=options.standby,
                max_slice_restarts=None,
                cluster_host="127.0.0.1" if switch is None else switch.own_address,
                cluster_port=0,
                proxy_port=0,
                settings=tuple(options.set),
                worker_prefixes=() if switch is None else tuple(switch.on(slot) for slot in range(topology.slots)),
            ),
            log,
        )
        await cluster.start()
        print(json.dumps({"up": options.name}), flush=True)
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([ended, cluster.failure], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if cluster is not None:
            await cluster.stop("the soak is over")
        if switch is not None:
            switch.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--separate", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
