"""Shardings as the stock client sends them: tagged blobs, parsed once and kept.

A `Sharding` says which devices hold an array and which part of it each one has. Device `i` of its device list
has index domain `i`; numbers in an OpSharding's tile assignment are positions in that list, not device ids.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ridgeway.protocol import messages, status

SINGLE_DEVICE = "xla::ifrt::SingleDeviceSharding"
HLO = "xla::ifrt::HloSharding"
CONCRETE = "xla::ifrt::ConcreteSharding"
CONCRETE_EVEN = "xla::ifrt::ConcreteEvenSharding"
OPAQUE = "xla::ifrt::OpaqueSharding"
SHARDING_PARAM = "xla::ifrt::ShardingParamSharding"

type Shape = tuple[int, ...]
type IndexDomain = tuple[slice, ...]

#: Sharding blobs kept parsed, over all sessions; a training program uses some dozens.
PARSED_SHARDINGS_LIMIT = 4096
#: Shapes for which one sharding keeps its computed shard shapes and index domains.
_SHAPES_LIMIT = 256

# `xla.OpSharding.Type`.
_REPLICATED = 0
_MAXIMAL = 1
_TUPLE = 2
_OTHER = 3
_MANUAL = 4
_UNKNOWN = 5
_UNREDUCED = 6


@dataclass(frozen=True, slots=True)
class Tiling:
    """How an array is cut into equal tiles.

    Attributes:
        tiles: number of tiles along each dimension of the array; empty if every device has the whole array,
            whatever its rank.
        tile_of_device: for the device at each position of the device list, the row-major number of its tile.
            Several devices with the same tile are replicas. Empty if `tiles` is.
        partial: devices hold terms of a sum, or values that differ in an undeclared way (UNREDUCED and MANUAL
            subgroups): tiles with the same number are then not replicas of each other.
    """

    tiles: Shape
    tile_of_device: tuple[int, ...]
    partial: bool = False


WHOLE = Tiling((), ())


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """Immutable. Two shardings from the same blob are the same object while it is in the cache, see `parse`.

    Attributes:
        type_name: tag of the blob, for example "xla::ifrt::HloSharding".
        data: the blob, as it came.
        devices: global device ids, in the order of the shards.
        memory_kind: "device", "pinned_host", ...; None for the devices' default.
        tiling: how the array is cut; None if the sharding doesn't say (opaque and concrete ones).
        full_shape: the only array shape this sharding fits, for concrete ones.
        concrete_shapes: shape of the shard on each device, for concrete ones.
    """

    type_name: str
    data: bytes
    devices: tuple[int, ...]
    memory_kind: str | None
    tiling: Tiling | None
    full_shape: Shape | None = None
    concrete_shapes: tuple[Shape, ...] | None = None
    _shapes: dict[Shape, tuple[Shape, ...]] = field(default_factory=dict, repr=False)
    _domains: dict[Shape, tuple[IndexDomain, ...]] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sharding):
            return NotImplemented
        return self.data == other.data and self.type_name == other.type_name

    def __hash__(self) -> int:
        return hash(self.data)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole array. A single device does."""
        if len(self.devices) == 1:
            return True
        tiling = self.tiling
        return tiling is not None and not tiling.partial and math.prod(tiling.tiles) == 1

    def shard_shape(self, shape: Shape) -> Shape:
        """The shape of every shard of an array of `shape`; with uneven tiles, that of the largest one.

        Raises:
            StatusError: INVALID_ARGUMENT if the sharding does not fit `shape`, or its shards differ by
                declaration.
        """
        tiling = self.tiling
        if tiling is not None:
            self._check_shape(shape)
            if not tiling.tiles:
                return shape
            return tuple([-(-dim // tiles) for dim, tiles in zip(shape, tiling.tiles, strict=True)])
        shapes = self.shard_shapes(shape)
        if any(other != shapes[0] for other in shapes):
            raise status.invalid_argument(
                f"A {self.type_name} of an array of shape {list(shape)} has shards of different shapes: "
                f"{[list(other) for other in shapes]}."
            ).error()
        return shapes[0]

    def shard_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shape of the shard on each of `devices`; at the end of an uneven dimension smaller.

        Raises:
            StatusError: INVALID_ARGUMENT if the sharding does not fit `shape` or does not know shard shapes.
        """
        known = self._shapes.get(shape)
        if known is not None:
            return known
        if self.tiling is not None:
            shapes = tuple(tuple([part.stop - part.start for part in domain]) for domain in self.index_domains(shape))
        elif self.concrete_shapes is not None:
            self._check_shape(shape)
            shapes = self.concrete_shapes
        else:
            raise status.invalid_argument(f"A {self.type_name} does not say what shapes its shards have.").error()
        _keep(self._shapes, shape, shapes)
        return shapes

    def index_domains(self, shape: Shape) -> tuple[IndexDomain, ...]:
        """The part of an array of `shape` that each of `devices` holds: slices with start and stop, step 1.

        Raises:
            StatusError: INVALID_ARGUMENT if the sharding does not fit `shape` or does not know index domains.
        """
        known = self._domains.get(shape)
        if known is not None:
            return known
        tiling = self.tiling
        if tiling is None:
            raise status.invalid_argument(
                f"A {self.type_name} does not say which part of the array each device has."
            ).error()
        self._check_shape(shape)
        if not tiling.tiles:
            domains = (tuple([slice(0, dim) for dim in shape]),) * len(self.devices)
        else:
            coordinates = np.unravel_index(np.asarray(tiling.tile_of_device), tiling.tiles)
            columns: list[list[slice]] = []
            for dim, tiles, column in zip(shape, tiling.tiles, coordinates, strict=True):
                step = -(-dim // tiles)
                parts = [slice(min(tile * step, dim), min((tile + 1) * step, dim)) for tile in range(tiles)]
                columns.append([parts[tile] for tile in column.tolist()])
            domains = tuple(zip(*columns, strict=True))
        _keep(self._domains, shape, domains)
        return domains

    def _check_shape(self, shape: Shape) -> None:
        tiles = self.tiling.tiles if self.tiling is not None else ()
        if tiles and len(tiles) != len(shape):
            raise status.invalid_argument(
                f"A sharding that cuts {len(tiles)} dimensions, into {list(tiles)}, does not fit an array "
                f"of shape {list(shape)}."
            ).error()
        if self.full_shape is not None and shape != self.full_shape:
            raise status.invalid_argument(
                f"A {self.type_name} made for shape {list(self.full_shape)} does not fit {list(shape)}."
            ).error()


def _keep(cache: dict[Shape, Any], shape: Shape, value: Any) -> None:
    if len(cache) >= _SHAPES_LIMIT:
        cache.clear()
    cache[shape] = value


# --- parsing ------------------------------------------------------------------------------------------------


def parse(proto: Any) -> Sharding:
    """The `Sharding` of a `ShardingProto`, from the cache if its blob was seen before.

    Raises:
        StatusError: INVALID_ARGUMENT for a damaged or inconsistent sharding, UNIMPLEMENTED for an unknown
            kind.
    """
    serialized = proto.serialized_sharding
    return parse_blob(serialized.type_name, serialized.data)


@functools.lru_cache(maxsize=PARSED_SHARDINGS_LIMIT)
def parse_blob(type_name: str, data: bytes) -> Sharding:
    """As `parse`, from the blob's tag and its bytes."""
    reader = _READERS.get(type_name)
    if reader is None:
        raise status.unimplemented(
            f"Shardings of type {type_name or '(none)'} are not supported; use jax.sharding.NamedSharding, "
            "GSPMDSharding or SingleDeviceSharding."
        ).error()
    try:
        return reader(data)
    except DecodeError:
        raise status.invalid_argument(f"A sharding tagged {type_name} cannot be read.").error() from None


def _memory_kind(proto: Any) -> str | None:
    return proto.memory_kind or None


def _read_single_device(data: bytes) -> Sharding:
    proto = messages.SingleDeviceShardingProto.FromString(data)
    return Sharding(SINGLE_DEVICE, data, (proto.device_id,), _memory_kind(proto), WHOLE)


def _read_hlo(data: bytes) -> Sharding:
    proto = messages.HloShardingProto.FromString(data)
    devices = tuple(proto.devices.device_ids)
    tiling = tiling_from_op_sharding(proto.xla_op_sharding, len(devices))
    return Sharding(HLO, data, devices, _memory_kind(proto), tiling)


def _tiling_of_undeclared(devices: tuple[int, ...]) -> Tiling | None:
    # One device can only hold the whole array, whatever the sharding says or leaves open.
    return WHOLE if len(devices) == 1 else None


def _read_opaque(data: bytes) -> Sharding:
    proto = messages.OpaqueShardingProto.FromString(data)
    devices = tuple(proto.devices.device_ids)
    return Sharding(OPAQUE, data, devices, _memory_kind(proto), _tiling_of_undeclared(devices))


def _read_concrete(data: bytes) -> Sharding:
    proto = messages.ConcreteShardingProto.FromString(data)
    if proto.HasField("dynamic_shape") or proto.shard_dynamic_shapes:
        raise status.unimplemented("Arrays of dynamic shape are not supported.").error()
    devices = tuple(proto.devices.device_ids)
    shapes = tuple(tuple(shape.dims) for shape in proto.shard_shapes)
    if len(shapes) != len(devices):
        raise status.invalid_argument(
            f"A concrete sharding names {len(devices)} devices but {len(shapes)} shard shapes."
        ).error()
    shape, tiling = tuple(proto.shape.dims), _tiling_of_undeclared(devices)
    if tiling is WHOLE and shapes[0] != shape:
        raise status.invalid_argument(
            f"A concrete sharding puts an array of shape {list(shape)} on one device as {list(shapes[0])}."
        ).error()
    return Sharding(CONCRETE, data, devices, _memory_kind(proto), tiling, shape, shapes)


def _read_concrete_even(data: bytes) -> Sharding:
    proto = messages.ConcreteEvenShardingProto.FromString(data)
    devices = tuple(proto.devices.device_ids)
    shape, shard_shape = tuple(proto.shape.dims), tuple(proto.shard_shape.dims)
    if (proto.is_fully_replicated or len(devices) == 1) and shape != shard_shape:
        raise status.invalid_argument(
            f"A concrete sharding replicates an array of shape {list(shape)} as {list(shard_shape)}."
        ).error()
    # Any other even sharding doesn't say which shard lies where.
    tiling = WHOLE if proto.is_fully_replicated else _tiling_of_undeclared(devices)
    return Sharding(CONCRETE_EVEN, data, devices, _memory_kind(proto), tiling, shape, (shard_shape,) * len(devices))


_READERS = {
    SINGLE_DEVICE: _read_single_device,
    HLO: _read_hlo,
    OPAQUE: _read_opaque,
    CONCRETE: _read_concrete,
    CONCRETE_EVEN: _read_concrete_even,
}


def tiling_from_op_sharding(proto: Any, device_count: int) -> Tiling:
    """The tiling an `xla.OpSharding` describes over `device_count` devices.

    Raises:
        StatusError: INVALID_ARGUMENT if it is inconsistent or made for another number of devices,
            UNIMPLEMENTED for tuples.
    """
    if proto.HasField("named_sharding"):
        return _tiling_from_named(proto.named_sharding, device_count)
    kind = proto.type
    if kind in (_REPLICATED, _MAXIMAL):
        return WHOLE
    if kind in (_MANUAL, _UNREDUCED, _UNKNOWN):
        return WHOLE if device_count == 1 else Tiling((), (), partial=True)
    if kind != _OTHER:
        name = "TUPLE" if kind == _TUPLE else f"number {kind}"
        raise status.unimplemented(f"An array sharding of type {name} is not supported.").error()
    dims = tuple(proto.tile_assignment_dimensions)
    trailing = len(proto.last_tile_dims) or int(proto.replicate_on_last_tile_dim)
    if not dims or trailing > len(dims) or min(dims) < 1:
        raise status.invalid_argument(f"A sharding has tile assignment dimensions {list(dims)}.").error()
    if math.prod(dims) != device_count:
        raise status.invalid_argument(
            f"A sharding with tile assignment {list(dims)} is for {math.prod(dims)} devices, but "
            f"{device_count} are named."
        ).error()
    order = _device_order(
        device_count,
        proto.tile_assignment_devices,
        proto.iota_reshape_dims or (device_count,),
        proto.iota_transpose_perm,
    )
    tiles = dims[: len(dims) - trailing]
    partial = any(
        subgroup != _REPLICATED and dim > 1
        # Empty when the only trailing dimension is a plain replication.
        for subgroup, dim in zip(proto.last_tile_dims, dims[len(tiles) :], strict=False)
    )
    replicas = math.prod(dims[len(tiles) :])
    tile_of_device = np.empty(device_count, np.int64)
    tile_of_device[order] = np.arange(device_count) // replicas
    return _tiling(tiles, tile_of_device, partial)


def _tiling(tiles: Shape, tile_of_device: np.ndarray, partial: bool) -> Tiling:
    return Tiling(tiles, tuple(tile_of_device.tolist()), partial)


def _device_order(
    count: int, devices: Sequence[int], reshape_dims: Sequence[int], transpose_perm: Sequence[int]
) -> np.ndarray:
    """Device positions in row-major order of their tiles: listed, or those of a transposed iota."""
    if devices:
        order = np.asarray(list(devices), np.int64)
    else:
        dims, perm = tuple(reshape_dims), tuple(transpose_perm) or tuple(range(len(reshape_dims)))
        if math.prod(dims) != count or sorted(perm) != list(range(len(dims))):
            raise status.invalid_argument(
                f"A sharding orders {count} devices by reshaping to {list(dims)} and transposing by {list(perm)}."
            ).error()
        order = np.arange(count).reshape(dims).transpose(perm).ravel()
    if not np.array_equal(np.sort(order), np.arange(count)):
        raise status.invalid_argument(
            f"A sharding over {count} devices assigns tiles to the device positions {order.tolist()}."
        ).error()
    return order


def _tiling_from_named(proto: Any, device_count: int) -> Tiling:
    """The tiling of an `xla.NamedShardingProto`: a mesh of named axes, and the axes that cut each dimension.

    An axis may be used in parts: sub-axis (pre_size p, size s) of an axis of size n is the middle one when
    the axis is seen as p x s x n/(p*s), major to minor.
    """
    mesh = proto.mesh
    sizes = [axis.size for axis in mesh.axes]
    if not sizes:
        # No axes: everything on the one device named, or replicated.
        return WHOLE
    if math.prod(sizes) != device_count or min(sizes) < 1:
        raise status.invalid_argument(
            f"A sharding over a mesh of {sizes} is for {math.prod(sizes)} devices, but {device_count} are named."
        ).error()
    iota = mesh.iota_transform
    order = _device_order(device_count, mesh.device_ids, iota.reshape_dims or (device_count,), iota.transpose_perm)
    coordinates = np.unravel_index(np.arange(device_count), sizes)
    tiles: list[int] = []
    tile_in_order = np.zeros(device_count, np.int64)
    for dimension in proto.dim_shardings:
        count = 1
        for axis in dimension.axes:
            index = axis.mesh_axis_index
            if not 0 <= index < len(sizes):
                raise status.invalid_argument(f"A sharding names axis {index} of a mesh of {sizes}.").error()
            coordinate, size = coordinates[index], sizes[index]
            if axis.HasField("sub_axis_info"):
                before, part = axis.sub_axis_info.pre_size, axis.sub_axis_info.size
                if before < 1 or part < 1 or size % (before * part):
                    raise status.invalid_argument(
                        f"A sharding names part ({before}){part} of a mesh axis of size {size}."
                    ).error()
                coordinate, size = coordinate // (size // (before * part)) % part, part
            tile_in_order = tile_in_order * size + coordinate
            count *= size
        tiles.append(count)
    tile_of_device = np.empty(device_count, np.int64)
    tile_of_device[order] = tile_in_order
    partial = any(
        axis.sub_axis_info.size > 1 if axis.HasField("sub_axis_info") else sizes[axis.mesh_axis_index] > 1
        for axis in (*proto.unreduced_axes, *proto.manual_axes)
    )
    if not tiles:
        return Tiling((), (), partial)
    return _tiling(tuple(tiles), tile_of_device, partial)


def move(sharding: Sharding, devices: tuple[int, ...], memory_kind: str | None) -> Sharding:
    """The same sharding over as many other devices, or in another memory."""
    marker = f"moved to {devices} {memory_kind}".encode()  # so that it equals no sharding of other devices
    return replace(
        sharding, data=sharding.data + marker, devices=devices, memory_kind=memory_kind, _shapes={}, _domains={}
    )


def declare_tiling(sharding: Sharding, tiling: Tiling) -> Sharding:
    """A sharding that did not say how the array is cut, with what is known of it."""
    return replace(
        sharding, data=sharding.data + f"tiled by {tiling}".encode(), tiling=tiling, _shapes={}, _domains={}
    )


# --- building -----------------------------------------------------------------------------------------------


def _tagged(type_name: str, data: bytes) -> bytes:
    proto = messages.ShardingProto()
    proto.serialized_sharding.type_name = type_name
    proto.serialized_sharding.data = data
    return proto.SerializeToString()


@functools.lru_cache(maxsize=PARSED_SHARDINGS_LIMIT)
def single_device_sharding_proto(device_id: int, memory_kind: str | None = None) -> bytes:
    """A serialized `ShardingProto` that puts an array on one device, ready for `MergeFromString`."""
    proto = messages.SingleDeviceShardingProto(device_id=device_id)
    if memory_kind is not None:
        proto.memory_kind = memory_kind
    return _tagged(SINGLE_DEVICE, proto.SerializeToString())


@functools.lru_cache(maxsize=PARSED_SHARDINGS_LIMIT)
def hlo_sharding_proto(device_ids: tuple[int, ...], op_sharding: bytes, memory_kind: str | None = None) -> bytes:
    """A serialized `ShardingProto` of a serialized `xla.OpSharding` over `device_ids`.

    Raises:
        StatusError: INVALID_ARGUMENT if `op_sharding` cannot be read.
    """
    proto = messages.HloShardingProto()
    proto.devices.device_ids.extend(device_ids)
    try:
        proto.xla_op_sharding.ParseFromString(op_sharding)
    except DecodeError:
        raise status.invalid_argument("An OpSharding cannot be read.").error() from None
    if memory_kind is not None:
        proto.memory_kind = memory_kind
    return _tagged(HLO, proto.SerializeToString())
