"""Prints, as JSON, shardings of jax with the index domains jax gives them. Run in a process of its own.

Each case is [device ids in order, OpSharding in hex, array shape, per device a list of [start, stop]].
"""

import json
import math
import random
import sys
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ridgeway.protocol import messages

DEVICES = 8


def factors(generator: random.Random, count: int) -> list[int]:
    """Some factors of `count`, ones among them, in random order."""
    found: list[int] = []
    while count > 1:
        factor = generator.choice([size for size in range(2, count + 1) if count % size == 0])
        found.append(factor)
        count //= factor
    found += [1] * generator.randrange(2)
    generator.shuffle(found)
    return found or [1]


def case(sharding: Sharding, device_ids: list[int], op_sharding: bytes, shape: tuple[int, ...]) -> list[Any]:
    by_device = {device.id: index for device, index in sharding.devices_indices_map(shape).items()}
    domains = [
        [part.indices(dim)[:2] for part, dim in zip(by_device[device], shape, strict=True)] for device in device_ids
    ]
    return [device_ids, op_sharding.hex(), shape, domains]


def named_case(generator: random.Random, devices: list[Any]) -> list[Any]:
    """A NamedSharding over a mesh of some devices in random order: compound, unused and repeated axes."""
    chosen = generator.sample(devices, generator.choice([1, 2, 4, 6, 8, 8]))
    if generator.random() < 0.3:
        chosen.sort(key=lambda device: device.id)
    sizes = factors(generator, len(chosen))
    names = [f"axis{number}" for number in range(len(sizes))]
    mesh = Mesh(np.array(chosen).reshape(sizes), names)
    rank = generator.randrange(4)
    axes: list[list[str]] = [[] for _ in range(rank)]
    for name in generator.sample(names, len(names)):
        position = generator.randrange(rank + 1)
        if position < rank:
            axes[position].append(name)
    cut = [math.prod(mesh.shape[name] for name in used) for used in axes]
    shape = tuple(size * generator.randrange(1, 4) for size in cut)
    sharding = NamedSharding(mesh, PartitionSpec(*[tuple(used) or None for used in axes]))
    op_sharding = sharding._to_xla_hlo_sharding(rank).to_proto().SerializeToString()
    return case(sharding, [device.id for device in mesh.devices.flat], op_sharding, shape)


def mesh_case(generator: random.Random, devices: list[Any]) -> list[Any]:
    """An OpSharding in the newer form, a mesh of named axes which may be used in parts, as XLA reads it."""
    sizes = factors(generator, DEVICES)
    op_sharding = messages.OpSharding()
    proto = op_sharding.named_sharding
    for number, size in enumerate(sizes):
        proto.mesh.axes.add(name=f"axis{number}", size=size)
    order = list(range(DEVICES))
    if generator.random() < 0.5:
        generator.shuffle(order)
        if order != sorted(order):
            proto.mesh.device_ids.extend(order)
    pieces: list[tuple[int, int, int] | tuple[int]] = []
    for number, size in enumerate(sizes):
        if size in (4, 8) and generator.random() < 0.7:
            part = generator.choice([part for part in (2, 4) if part < size])
            pieces += [(number, 1, part), (number, part, size // part)]
        else:
            pieces.append((number,))
    rank = generator.randrange(1, 4)
    used: list[list[tuple[int, ...]]] = [[] for _ in range(rank)]
    for piece in generator.sample(pieces, len(pieces)):
        position = generator.randrange(rank + 1)
        if position == rank:
            continue
        last = used[position][-1] if used[position] else ()
        # XLA refuses two neighbouring parts that it could join.
        if len(last) == 3 and len(piece) == 3 and last[0] == piece[0] and last[1] * last[2] == piece[1]:
            continue
        used[position].append(piece)
    shape = []
    for dimension in used:
        dim_sharding = proto.dim_shardings.add(is_closed=True)
        cut = 1
        for piece in dimension:
            axis = dim_sharding.axes.add(mesh_axis_index=piece[0])
            cut *= piece[2] if len(piece) == 3 else sizes[piece[0]]
            if len(piece) == 3:
                axis.sub_axis_info.pre_size, axis.sub_axis_info.size = piece[1:]
        shape.append(cut * generator.randrange(1, 3))
    data = op_sharding.SerializeToString()
    theirs = xla_client.OpSharding()
    theirs.ParseFromString(data)
    sharding = GSPMDSharding(tuple(devices), xla_client.HloSharding.from_proto(theirs))
    return case(sharding, [device.id for device in devices], data, tuple(shape))


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    devices = jax.devices()
    generator = random.Random(int(sys.argv[1]))
    cases = [named_case(generator, devices) for _ in range(int(sys.argv[2]))]
    cases += [mesh_case(generator, devices) for _ in range(int(sys.argv[3]))]
    json.dump(cases, sys.stdout)


if __name__ == "__main__":
    main()
