import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeway.protocol import dtypes, messages
from ridgeway.protocol.status import Code, StatusError

NUMERIC_KINDS = sorted(kind for kind in dtypes._DTYPE_BY_KIND if kind != dtypes.KIND_STRING)
F32 = dtypes.kind_of_dtype(np.float32)
S4 = dtypes.kind_of_dtype(ml_dtypes.int4)


def some_values(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Values that every type can hold exactly and that are not all alike."""
    generator = np.random.default_rng(seed)
    if dtype == np.dtype(ml_dtypes.float8_e8m0fnu):
        return np.exp2(generator.integers(-3, 4, shape).astype(np.float32)).astype(dtype)
    return np.asarray(generator.integers(0, 2, shape)).astype(dtype)


def minimal_region(view: np.ndarray, base: np.ndarray) -> bytes:
    """The bytes from the first element of `view` to the end of its last, out of the memory of `base`."""
    start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    reach = sum((dim - 1) * stride for dim, stride in zip(view.shape, view.strides, strict=True))
    return base.tobytes()[start : start + reach + view.itemsize]


def test_kinds_are_those_of_the_protocol() -> None:
    described = messages.DTypeProto.DESCRIPTOR.enum_types_by_name["Kind"].values_by_number
    without_values = {0, dtypes.KIND_OPAQUE, dtypes.KIND_TOKEN}
    assert {*NUMERIC_KINDS, dtypes.KIND_STRING} == set(described) - without_values
    for kind in described:
        assert described[kind].name == f"KIND_{dtypes.kind_name(kind)}"


@pytest.mark.parametrize("kind", NUMERIC_KINDS, ids=dtypes.kind_name)
def test_kinds_dtypes_and_mlir_types_agree(kind: int) -> None:
    dtype = dtypes.dtype_of_kind(kind)
    assert dtypes.kind_of_dtype(dtype) == kind
    text = dtypes.mlir_of_kind(kind)
    if dtypes.kind_name(kind) == "S1":
        # MLIR has one signless one-bit integer, and jax's booleans are it.
        assert text == "i1"
        return
    assert dtypes.kind_of_mlir(text) == kind


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("i1", np.bool_),
        ("i8", np.int8),
        ("ui8", np.uint8),
        ("i4", ml_dtypes.int4),
        ("ui2", ml_dtypes.uint2),
        ("bf16", ml_dtypes.bfloat16),
        ("f64", np.float64),
        ("complex<f32>", np.complex64),
        ("f8E4M3FN", ml_dtypes.float8_e4m3fn),
        ("f8E4M3B11FNUZ", ml_dtypes.float8_e4m3b11fnuz),
        ("f4E2M1FN", ml_dtypes.float4_e2m1fn),
    ],
)
def test_mlir_types_that_jax_writes(text: str, dtype: type) -> None:
    assert dtypes.dtype_of_kind(dtypes.kind_of_mlir(text)) == np.dtype(dtype)


def test_types_without_host_values_are_refused() -> None:
    for call in (
        lambda: dtypes.dtype_of_kind(dtypes.KIND_TOKEN),
        lambda: dtypes.dtype_of_kind(77),
        lambda: dtypes.kind_of_dtype(np.dtype("datetime64[s]")),
        lambda: dtypes.kind_of_dtype(np.dtype(object)),
        lambda: dtypes.mlir_of_kind(dtypes.KIND_STRING),
    ):
        with pytest.raises(StatusError) as caught:
            call()
        assert caught.value.status.code is Code.INVALID_ARGUMENT
    with pytest.raises(StatusError) as caught:
        dtypes.kind_of_mlir("!stablehlo.token")
    assert caught.value.status.code is Code.UNIMPLEMENTED


@pytest.mark.parametrize("kind", NUMERIC_KINDS, ids=dtypes.kind_name)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0, 3), (2, 3), (3, 1, 4)], ids=str)
def test_row_major_buffers(kind: int, shape: tuple[int, ...]) -> None:
    array = some_values(dtypes.dtype_of_kind(kind), shape)
    data = array.tobytes()
    for strides in (None, array.strides):
        decoded = dtypes.decode_host_buffer(data, kind, shape, strides)
        assert decoded.shape == shape
        assert decoded.dtype == array.dtype
        assert decoded.tobytes() == data
        assert dtypes.encode_host_buffer(array, strides) == data


@pytest.mark.parametrize("kind", NUMERIC_KINDS, ids=dtypes.kind_name)
def test_strided_buffers(kind: int) -> None:
    base = some_values(dtypes.dtype_of_kind(kind), (5, 8, 3), seed=kind)
    for view in (base.transpose(2, 0, 1), base[::2, 1::3], base[1:2, :, ::2], base[:, 3, :], base[4, ::7]):
        data = minimal_region(view, base)
        decoded = dtypes.decode_host_buffer(data, kind, view.shape, view.strides)
        assert decoded.strides == view.strides or 1 in view.shape
        assert decoded.tobytes() == view.tobytes()
        encoded = dtypes.encode_host_buffer(view, view.strides)
        assert len(encoded) == len(data)
        again = dtypes.decode_host_buffer(encoded, kind, view.shape, view.strides)
        assert again.tobytes() == view.tobytes()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_layout_of_memory(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    kind = data.draw(st.sampled_from([S4, F32, dtypes.kind_of_dtype(np.complex128)]))
    dtype = dtypes.dtype_of_kind(kind)
    order = data.draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    reach = dtype.itemsize
    for axis in order:
        strides[axis] = reach + dtype.itemsize * data.draw(st.integers(0, 2))
        reach = strides[axis] * max(shape[axis], 1)
    array = some_values(dtype, shape, seed=data.draw(st.integers(0, 9)))
    encoded = dtypes.encode_host_buffer(array, tuple(strides))
    assert len(encoded) == dtypes.region_bytes(dtype.itemsize, shape, strides)
    assert dtypes.decode_host_buffer(encoded, kind, shape, tuple(strides)).tobytes() == array.tobytes()


def test_small_elements_take_a_byte_each() -> None:
    decoded = dtypes.decode_host_buffer(b"\x01\x0f\x07", S4, (3,))
    assert decoded.astype(int).tolist() == [1, -1, 7]


def test_a_stride_along_one_element_is_ignored() -> None:
    decoded = dtypes.decode_host_buffer(b"\0\0\x80?\0\0\0@", F32, (1, 2, 1), (-8, 4, 0))
    assert decoded.tolist() == [[[1.0], [2.0]]]


def test_a_buffer_is_not_copied() -> None:
    data = bytearray(np.arange(4, dtype=np.float32).tobytes())
    decoded = dtypes.decode_host_buffer(memoryview(data), F32, (4,))
    data[0:4] = np.float32(9).tobytes()
    assert decoded[0] == 9
    assert not dtypes.decode_host_buffer(bytes(data), F32, (4,)).flags.writeable


@pytest.mark.parametrize(
    ("size", "shape", "strides"),
    [
        (12, (4,), None),
        (20, (4,), None),
        (0, (4,), None),
        (4, (0, 3), None),
        (16, (2, 2), (12, 4)),
        (16, (4,), (4, 4)),
        (16, (4,), (-4,)),
        (16, (-4,), None),
    ],
)
def test_a_size_that_does_not_fit_is_refused(
    size: int, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    with pytest.raises(StatusError) as caught:
        dtypes.decode_host_buffer(bytes(size), F32, shape, strides)
    assert caught.value.status.code is Code.INVALID_ARGUMENT


def test_strings_survive() -> None:
    array = np.array([["a", "bé", ""], ["x" * 300, "\0", "日本"]], dtype=dtypes.STRING_DTYPE)
    data = dtypes.encode_host_buffer(array)
    assert list(messages.StringArrayContents.FromString(data).strings)[1] == "bé".encode()
    decoded = dtypes.decode_host_buffer(data, dtypes.KIND_STRING, (2, 3))
    assert decoded.dtype == dtypes.STRING_DTYPE
    assert decoded.tolist() == array.tolist()
    assert dtypes.kind_of_dtype(array.dtype) == dtypes.KIND_STRING
    empty = dtypes.decode_host_buffer(b"", dtypes.KIND_STRING, (0, 2))
    assert empty.shape == (0, 2)


@pytest.mark.parametrize(
    ("data", "shape"),
    [(b"\xff\xff", (1,)), (b"\x0a\x01a", (2,)), (b"\x0a\x01a", ()), (b"\x0a\x01\xff", (1,))],
)
def test_damaged_strings_are_refused(data: bytes, shape: tuple[int, ...]) -> None:
    if shape == ():
        assert dtypes.decode_host_buffer(data, dtypes.KIND_STRING, shape).tolist() == "a"
        return
    with pytest.raises(StatusError) as caught:
        dtypes.decode_host_buffer(data, dtypes.KIND_STRING, shape)
    assert caught.value.status.code is Code.INVALID_ARGUMENT


def test_a_random_cut_never_crashes() -> None:
    generator = random.Random(3)
    for _ in range(200):
        shape = tuple(generator.randrange(4) for _ in range(generator.randrange(4)))
        strides = tuple(generator.randrange(0, 40, 4) for _ in shape)
        size = generator.randrange(64)
        fits = size == dtypes.region_bytes(4, shape, strides)
        try:
            dtypes.decode_host_buffer(bytes(size), F32, shape, strides)
        except StatusError as error:
            assert error.status.code is Code.INVALID_ARGUMENT
            assert not fits
        else:
            assert fits
