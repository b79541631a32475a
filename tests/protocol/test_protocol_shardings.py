import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import run_python

from ridgeway.protocol import messages, shardings, status
from ridgeway.protocol.shardings import Sharding
from ridgeway.protocol.status import Code, StatusError

REFERENCE = Path(__file__).with_name("jax_reference.py")
NAMED_CASES = 400
MESH_CASES = 200

REPLICATED, MAXIMAL, TUPLE, OTHER, MANUAL, UNREDUCED = 0, 1, 2, 3, 4, 6

# Blobs as a stock jaxlib 0.12.0.1 client sent them for an array of shape (8, 8): tag, blob, device ids, and
# the number of tiles along each dimension.
CAPTURED = [
    (shardings.SINGLE_DEVICE, "", (0,), ()),
    (shardings.SINGLE_DEVICE, "0807", (7,), ()),
    (shardings.HLO, "0a030a01031200", (3,), ()),
    (shardings.HLO, "0a0a0a0803010002070605041200", (3, 1, 0, 2, 7, 6, 5, 4), ()),
    (shardings.HLO, "0a0a0a080001020304050607120f08031a0302010430014a0108520100", tuple(range(8)), (2, 1)),
    (shardings.HLO, "0a0a0a080001020304050607120e08031a0204024a02020452020100", tuple(range(8)), (4, 2)),
    (
        shardings.HLO,
        "0a0a0a080301000207060504121308031a0302010430014a030202025203010002",
        (3, 1, 0, 2, 7, 6, 5, 4),
        (2, 1),
    ),
    (shardings.HLO, "0a060a0404050607120c08031a0204014a0104520100", (4, 5, 6, 7), (4, 1)),
]


def parse_hlo(devices: tuple[int, ...], op_sharding: Any, memory_kind: str | None = None) -> Sharding:
    data = shardings.hlo_sharding_proto(devices, op_sharding.SerializeToString(), memory_kind)
    return shardings.parse(messages.ShardingProto.FromString(data))


def tiled(tiles: list[int], **fields: Any) -> Any:
    return messages.OpSharding(type=OTHER, tile_assignment_dimensions=tiles, **fields)


def bounds(sharding: Sharding, shape: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    return [[(part.start, part.stop) for part in domain] for domain in sharding.index_domains(shape)]


def parse_concrete(kind: str, proto: Any) -> Sharding:
    return shardings.parse_blob(kind, proto.SerializeToString())


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    return json.loads(run_python(str(REFERENCE), "11", str(NAMED_CASES), str(MESH_CASES)))


def test_index_domains_are_those_of_jax(reference: list[Any]) -> None:
    assert len(reference) == NAMED_CASES + MESH_CASES
    kinds = set()
    for devices, op_sharding, shape, expected in reference:
        sharding = parse_hlo(tuple(devices), messages.OpSharding.FromString(bytes.fromhex(op_sharding)))
        assert sharding.devices == tuple(devices)
        found = [[list(pair) for pair in domain] for domain in bounds(sharding, tuple(shape))]
        assert found == expected, (devices, op_sharding, shape)
        shard_shape = tuple(stop - start for start, stop in expected[0])
        assert sharding.shard_shape(tuple(shape)) == shard_shape
        assert sharding.shard_shapes(tuple(shape)) == (shard_shape,) * len(devices)
        assert sharding.is_fully_replicated == (len(devices) == 1 or shard_shape == tuple(shape))
        kinds.add((len(devices), math.prod(shape) // max(math.prod(shard_shape), 1)))
    # All sorts were met: one device, replicated, partly replicated, fully sharded.
    assert {(1, 1), (8, 1), (8, 2), (8, 4), (8, 8), (6, 3)} <= kinds


@pytest.mark.parametrize(("type_name", "data", "devices", "tiles"), CAPTURED)
def test_blobs_of_a_stock_client(type_name: str, data: str, devices: tuple[int, ...], tiles: tuple[int, ...]) -> None:
    sharding = shardings.parse_blob(type_name, bytes.fromhex(data))
    assert sharding.devices == devices
    assert sharding.type_name == type_name
    assert sharding.data == bytes.fromhex(data)
    assert sharding.memory_kind is None
    assert sharding.tiling is not None
    assert sharding.tiling.tiles == tiles
    cut = tiles or (1, 1)
    assert sharding.shard_shape((8, 8)) == (8 // cut[0], 8 // cut[1])


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_domains_cover_every_element_once_for_each_replica(
    tiles: list[int], replicas: int, dims: list[int], generator: Any
) -> None:
    shape = tuple(dims[: len(tiles)])
    count = math.prod(tiles) * replicas
    order = list(range(count))
    generator.shuffle(order)
    op_sharding = tiled([*tiles, replicas], tile_assignment_devices=order, replicate_on_last_tile_dim=True)
    sharding = parse_hlo(tuple(range(100, 100 + count)), op_sharding)
    holders = np.zeros(shape, int)
    for domain, shard_shape in zip(sharding.index_domains(shape), sharding.shard_shapes(shape), strict=True):
        holders[domain] += 1
        assert holders[domain].shape == shard_shape
        assert all(a <= b for a, b in zip(shard_shape, sharding.shard_shape(shape), strict=True))
    assert (holders == replicas).all()
    # Row-major in the tile assignment: the first devices listed hold the beginning of the array.
    first = sharding.index_domains(shape)[order[0]]
    assert all(part.start == 0 for part in first)


@pytest.mark.parametrize(
    ("dim", "tiles", "expected"),
    [
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (3, 4, [(0, 1), (1, 2), (2, 3), (3, 3)]),
        (9, 4, [(0, 3), (3, 6), (6, 9), (9, 9)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_uneven_tiles_round_up_and_clamp(dim: int, tiles: int, expected: list[tuple[int, int]]) -> None:
    sharding = parse_hlo(tuple(range(tiles)), tiled([tiles]))
    assert [domain[0] for domain in bounds(sharding, (dim,))] == expected
    assert sharding.shard_shape((dim,)) == (-(-dim // tiles),)
    assert sharding.shard_shapes((dim,)) == tuple((stop - start,) for start, stop in expected)


def test_listed_devices_are_positions_in_the_device_list() -> None:
    sharding = parse_hlo((40, 30, 20, 10), tiled([4], tile_assignment_devices=[2, 0, 3, 1]))
    assert bounds(sharding, (8,)) == [[(2, 4)], [(6, 8)], [(0, 2)], [(4, 6)]]


@pytest.mark.parametrize(
    ("fields", "partial"),
    [
        ({"last_tile_dims": [REPLICATED]}, False),
        ({"last_tile_dims": [MANUAL]}, True),
        ({"last_tile_dims": [UNREDUCED]}, True),
    ],
)
def test_subgroups_keep_their_tile_but_may_be_partial(fields: dict[str, Any], partial: bool) -> None:
    sharding = parse_hlo((0, 1, 2, 3), tiled([2, 2], **fields))
    assert bounds(sharding, (4,)) == [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]
    assert sharding.tiling is not None
    assert sharding.tiling.partial is partial
    one = parse_hlo((0, 1), tiled([1, 2], **fields))
    assert one.is_fully_replicated is not partial


def test_a_subgroup_of_one_device_is_not_partial() -> None:
    sharding = parse_hlo((0, 1), tiled([2, 1], last_tile_dims=[UNREDUCED]))
    assert sharding.tiling is not None
    assert not sharding.tiling.partial


def test_two_subgroups() -> None:
    sharding = parse_hlo(tuple(range(8)), tiled([2, 2, 2], last_tile_dims=[MANUAL, REPLICATED]))
    assert sharding.shard_shape((4,)) == (2,)
    assert bounds(sharding, (4,)) == [[(0, 2)]] * 4 + [[(2, 4)]] * 4
    assert sharding.tiling is not None
    assert sharding.tiling.partial


@pytest.mark.parametrize("kind", [REPLICATED, MAXIMAL, MANUAL, UNREDUCED])
@pytest.mark.parametrize("shape", [(), (3,), (4, 0, 2)], ids=str)
def test_untiled_shardings_hold_the_whole_shape(kind: int, shape: tuple[int, ...]) -> None:
    sharding = parse_hlo((4, 2), messages.OpSharding(type=kind))
    assert sharding.shard_shapes(shape) == (shape, shape)
    assert sharding.is_fully_replicated is (kind in (REPLICATED, MAXIMAL))
    assert parse_hlo((4,), messages.OpSharding(type=kind)).is_fully_replicated


def test_a_mesh_ordered_by_a_transposed_iota() -> None:
    op_sharding = messages.OpSharding()
    mesh = op_sharding.named_sharding.mesh
    mesh.axes.add(name="x", size=4)
    mesh.iota_transform.reshape_dims.extend([2, 2])
    mesh.iota_transform.transpose_perm.extend([1, 0])
    op_sharding.named_sharding.dim_shardings.add().axes.add(mesh_axis_index=0)
    sharding = parse_hlo((0, 1, 2, 3), op_sharding)
    # Positions in the order of the mesh: 0, 2, 1, 3.
    assert bounds(sharding, (4,)) == [[(0, 1)], [(2, 3)], [(1, 2)], [(3, 4)]]


def test_a_named_sharding_with_unreduced_axes_is_partial() -> None:
    op_sharding = messages.OpSharding()
    named = op_sharding.named_sharding
    named.mesh.axes.add(name="x", size=2)
    named.mesh.axes.add(name="y", size=2)
    named.dim_shardings.add().axes.add(mesh_axis_index=0)
    named.unreduced_axes.add(mesh_axis_index=1)
    sharding = parse_hlo((0, 1, 2, 3), op_sharding)
    assert sharding.shard_shape((6,)) == (3,)
    assert sharding.tiling is not None
    assert sharding.tiling.partial


def test_memory_kinds() -> None:
    blob = shardings.single_device_sharding_proto(5, "pinned_host")
    assert shardings.parse(messages.ShardingProto.FromString(blob)).memory_kind == "pinned_host"
    assert parse_hlo((1,), messages.OpSharding(), "device").memory_kind == "device"
    assert parse_hlo((1,), messages.OpSharding()).memory_kind is None


def test_built_blobs_are_those_of_the_client() -> None:
    for type_name, data, devices, _ in CAPTURED:
        blob = bytes.fromhex(data)
        if type_name == shardings.SINGLE_DEVICE:
            built = shardings.single_device_sharding_proto(devices[0])
        else:
            op_sharding = messages.HloShardingProto.FromString(blob).xla_op_sharding.SerializeToString()
            built = shardings.hlo_sharding_proto(devices, op_sharding)
        target = messages.LoadedExecutableExecuteResponse.Output()
        target.sharding.MergeFromString(built)
        assert target.sharding.serialized_sharding.type_name == type_name
        assert target.sharding.serialized_sharding.data == blob


def test_concrete_sharding() -> None:
    proto = messages.ConcreteShardingProto()
    proto.devices.device_ids.extend([3, 1])
    proto.shape.dims.extend([5])
    for dim in (2, 3):
        proto.shard_shapes.add().dims.append(dim)
    sharding = parse_concrete(shardings.CONCRETE, proto)
    assert sharding.devices == (3, 1)
    assert sharding.shard_shapes((5,)) == ((2,), (3,))
    for call in (
        lambda: sharding.shard_shape((5,)),
        lambda: sharding.shard_shapes((6,)),
        lambda: sharding.index_domains((5,)),
    ):
        with pytest.raises(StatusError) as caught:
            call()
        assert caught.value.status.code is Code.INVALID_ARGUMENT
    proto.shard_shapes.add()
    with pytest.raises(StatusError, match="2 devices but 3 shard shapes"):
        parse_concrete(shardings.CONCRETE, proto)


def test_concrete_sharding_of_dynamic_shape_is_unimplemented() -> None:
    proto = messages.ConcreteShardingProto()
    proto.dynamic_shape.SetInParent()
    with pytest.raises(StatusError) as caught:
        parse_concrete(shardings.CONCRETE, proto)
    assert caught.value.status.code is Code.UNIMPLEMENTED


@pytest.mark.parametrize(("replicated", "shard"), [(True, 6), (False, 3)])
def test_concrete_even_sharding(replicated: bool, shard: int) -> None:
    proto = messages.ConcreteEvenShardingProto(is_fully_replicated=replicated, memory_kind="device")
    proto.devices.device_ids.extend([0, 1])
    proto.shape.dims.append(6)
    proto.shard_shape.dims.append(shard)
    sharding = parse_concrete(shardings.CONCRETE_EVEN, proto)
    assert sharding.memory_kind == "device"
    assert sharding.shard_shape((6,)) == (shard,)
    assert sharding.shard_shapes((6,)) == ((shard,), (shard,))
    assert sharding.is_fully_replicated is replicated
    if replicated:
        assert bounds(sharding, (6,)) == [[(0, 6)], [(0, 6)]]
    else:
        with pytest.raises(StatusError, match="does not say which part"):
            sharding.index_domains((6,))
    with pytest.raises(StatusError, match="does not fit"):
        sharding.shard_shape((7,))
    proto.is_fully_replicated = True
    proto.shape.dims[0] = 7
    with pytest.raises(StatusError, match="replicates"):
        parse_concrete(shardings.CONCRETE_EVEN, proto)


def test_opaque_sharding() -> None:
    proto = messages.OpaqueShardingProto()
    proto.devices.device_ids.extend([0, 1])
    sharding = parse_concrete(shardings.OPAQUE, proto)
    assert sharding.devices == (0, 1)
    assert not sharding.is_fully_replicated
    with pytest.raises(StatusError, match="does not say what shapes"):
        sharding.shard_shape((4,))
    del proto.devices.device_ids[1:]
    assert parse_concrete(shardings.OPAQUE, proto).shard_shape((4,)) == (4,)


@pytest.mark.parametrize(
    "op_sharding",
    [
        tiled([]),
        tiled([3]),
        tiled([0]),
        tiled([-2, -2]),
        tiled([4], tile_assignment_devices=[0, 1, 2, 2]),
        tiled([4], tile_assignment_devices=[1, 2, 3, 4]),
        tiled([4], tile_assignment_devices=[0, 1]),
        tiled([4], iota_reshape_dims=[2, 3], iota_transpose_perm=[1, 0]),
        tiled([4], iota_reshape_dims=[2, 2], iota_transpose_perm=[1, 1]),
        tiled([4], iota_reshape_dims=[2, 2], iota_transpose_perm=[0]),
        tiled([4], last_tile_dims=[REPLICATED, MANUAL]),
    ],
)
def test_inconsistent_tilings_are_refused(op_sharding: Any) -> None:
    with pytest.raises(StatusError) as caught:
        parse_hlo((0, 1, 2, 3), op_sharding)
    assert caught.value.status.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("damage", ["size", "axis", "negative axis", "part"])
def test_inconsistent_meshes_are_refused(damage: str) -> None:
    op_sharding = messages.OpSharding()
    named = op_sharding.named_sharding
    named.mesh.axes.add(name="x", size=3 if damage == "size" else 4)
    axis = named.dim_shardings.add().axes.add(mesh_axis_index={"axis": 1, "negative axis": -1}.get(damage, 0))
    if damage == "part":
        axis.sub_axis_info.pre_size, axis.sub_axis_info.size = 2, 3
    with pytest.raises(StatusError) as caught:
        parse_hlo((0, 1, 2, 3), op_sharding)
    assert caught.value.status.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("type_name", [shardings.SHARDING_PARAM, "xla::ifrt::New", ""])
def test_unknown_kinds_are_unimplemented(type_name: str) -> None:
    with pytest.raises(StatusError) as caught:
        shardings.parse_blob(type_name, b"")
    assert caught.value.status.code is Code.UNIMPLEMENTED
    assert type_name in caught.value.status.message


def test_a_tuple_sharding_is_unimplemented() -> None:
    with pytest.raises(StatusError) as caught:
        parse_hlo((0,), messages.OpSharding(type=TUPLE))
    assert caught.value.status.code is Code.UNIMPLEMENTED


@pytest.mark.parametrize("type_name", [shardings.HLO, shardings.SINGLE_DEVICE, shardings.CONCRETE])
def test_damaged_blobs_are_refused(type_name: str) -> None:
    with pytest.raises(StatusError) as caught:
        shardings.parse_blob(type_name, b"\x0a\xff")
    assert caught.value.status.code is Code.INVALID_ARGUMENT
    assert type_name in caught.value.status.message


def test_an_array_of_another_rank_is_refused() -> None:
    sharding = parse_hlo((0, 1), tiled([2]))
    for call in (sharding.shard_shape, sharding.shard_shapes, sharding.index_domains):
        with pytest.raises(StatusError, match="does not fit an array of shape"):
            call((2, 2))


def test_the_same_blob_is_parsed_once() -> None:
    op_sharding = tiled([2])
    first, second = parse_hlo((0, 1), op_sharding), parse_hlo((0, 1), op_sharding)
    assert first is second
    assert first.index_domains((4,)) is second.index_domains((4,))
    assert first != parse_hlo((0, 2), op_sharding)
    shardings.parse_blob.cache_clear()
    again = parse_hlo((0, 1), op_sharding)
    assert again is not first
    assert again == first
    assert hash(again) == hash(first)


def test_kept_shapes_are_bounded() -> None:
    sharding = parse_hlo((0, 1), tiled([2]))
    for dim in range(3 * shardings._SHAPES_LIMIT):
        assert sharding.shard_shapes((2 * dim,)) == ((dim,), (dim,))
    assert len(sharding._domains) <= shardings._SHAPES_LIMIT
    assert len(sharding._shapes) <= shardings._SHAPES_LIMIT


def test_a_damaged_op_sharding_is_not_built_into_a_blob() -> None:
    with pytest.raises(StatusError) as caught:
        shardings.hlo_sharding_proto((0,), b"\x0a\xff")
    assert caught.value.status.code is Code.INVALID_ARGUMENT


def test_every_order_of_iota_is_a_permutation() -> None:
    for perm in itertools.permutations(range(3)):
        sharding = parse_hlo(tuple(range(24)), tiled([24], iota_reshape_dims=[2, 3, 4], iota_transpose_perm=list(perm)))
        order = np.arange(24).reshape(2, 3, 4).transpose(perm).ravel()
        starts = [domain[0].start for domain in sharding.index_domains((24,))]
        assert [starts[position] for position in order] == list(range(24))


def test_a_status_of_a_sharding_is_never_retried() -> None:
    with pytest.raises(StatusError) as caught:
        shardings.parse_blob("INTERNAL::DATA_LOSS", b"")
    assert not any(code.name in str(caught.value) for code in status.RETRIED_CODES)
