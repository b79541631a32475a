"""Element types and host buffers: IFRT kinds, numpy dtypes, MLIR element types, and the client's bytes.

Layout facts, as the stock client has them (`xla/python/ifrt_proxy/common/array_util` of OpenXLA says the
same): every element takes whole bytes, so int4, int2, float4 and float6 take one byte each, as in ml_dtypes;
a buffer is the smallest memory region that holds all elements, from the first element to the end of the last;
without strides it is row-major; strings travel as a `StringArrayContents` message, row-major.
"""

import math
from collections.abc import Buffer, Sequence

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from ridgeway.protocol import messages, status

# Numbers of `xla.ifrt.DTypeProto.Kind`.
KIND_UNSPECIFIED = 0
KIND_PRED = 1
KIND_OPAQUE = 14
KIND_TOKEN = 17
KIND_STRING = 99

# Kind, its name, the numpy type, and the element type in the text of an MLIR module as jax writes it: signed
# integers without a sign, "i1" for booleans. A signed one-bit integer would be "i1" too, so it is read back
# as a boolean.
_TABLE: tuple[tuple[int, str, type[np.generic], str], ...] = (
    (1, "PRED", np.bool_, "i1"),
    (26, "S2", ml_dtypes.int2, "i2"),
    (21, "S4", ml_dtypes.int4, "i4"),
    (2, "S8", np.int8, "i8"),
    (3, "S16", np.int16, "i16"),
    (4, "S32", np.int32, "i32"),
    (5, "S64", np.int64, "i64"),
    (27, "U2", ml_dtypes.uint2, "ui2"),
    (22, "U4", ml_dtypes.uint4, "ui4"),
    (6, "U8", np.uint8, "ui8"),
    (7, "U16", np.uint16, "ui16"),
    (8, "U32", np.uint32, "ui32"),
    (9, "U64", np.uint64, "ui64"),
    (10, "F16", np.float16, "f16"),
    (11, "F32", np.float32, "f32"),
    (12, "F64", np.float64, "f64"),
    (16, "BF16", ml_dtypes.bfloat16, "bf16"),
    (15, "C64", np.complex64, "complex<f32>"),
    (18, "C128", np.complex128, "complex<f64>"),
    (29, "F8E3M4", ml_dtypes.float8_e3m4, "f8E3M4"),
    (28, "F8E4M3", ml_dtypes.float8_e4m3, "f8E4M3"),
    (20, "F8E4M3FN", ml_dtypes.float8_e4m3fn, "f8E4M3FN"),
    (23, "F8E4M3B11FNUZ", ml_dtypes.float8_e4m3b11fnuz, "f8E4M3B11FNUZ"),
    (25, "F8E4M3FNUZ", ml_dtypes.float8_e4m3fnuz, "f8E4M3FNUZ"),
    (19, "F8E5M2", ml_dtypes.float8_e5m2, "f8E5M2"),
    (24, "F8E5M2FNUZ", ml_dtypes.float8_e5m2fnuz, "f8E5M2FNUZ"),
    (31, "F8E8M0FNU", ml_dtypes.float8_e8m0fnu, "f8E8M0FNU"),
    (30, "F4E2M1FN", ml_dtypes.float4_e2m1fn, "f4E2M1FN"),
    (34, "F6E2M3FN", ml_dtypes.float6_e2m3fn, "f6E2M3FN"),
    (35, "F6E3M2FN", ml_dtypes.float6_e3m2fn, "f6E3M2FN"),
)

#: Numpy's variable-width strings, which is what jax holds string arrays in.
STRING_DTYPE = np.dtypes.StringDType()

_DTYPE_BY_KIND: dict[int, np.dtype] = {kind: np.dtype(scalar) for kind, _, scalar, _ in _TABLE}
_KIND_BY_DTYPE: dict[np.dtype, int] = {dtype: kind for kind, dtype in _DTYPE_BY_KIND.items()}
_KIND_BY_MLIR: dict[str, int] = {text: kind for kind, _, _, text in _TABLE}
_MLIR_BY_KIND: dict[int, str] = {kind: text for kind, _, _, text in _TABLE}
_NAME_BY_KIND: dict[int, str] = {kind: name for kind, name, _, _ in _TABLE}

# Only newer releases of ml_dtypes have one-bit integers.
for _kind, _name, _scalar_name, _text in ((32, "S1", "int1", "i1"), (33, "U1", "uint1", "ui1")):
    _NAME_BY_KIND[_kind] = _name
    if hasattr(ml_dtypes, _scalar_name):
        _dtype = np.dtype(getattr(ml_dtypes, _scalar_name))
        _DTYPE_BY_KIND[_kind] = _dtype
        _KIND_BY_DTYPE[_dtype] = _kind
        _MLIR_BY_KIND[_kind] = _text
        _KIND_BY_MLIR.setdefault(_text, _kind)

_DTYPE_BY_KIND[KIND_STRING] = STRING_DTYPE
_NAME_BY_KIND |= {
    KIND_STRING: "STRING",
    KIND_TOKEN: "TOKEN",
    KIND_OPAQUE: "OPAQUE",
    KIND_UNSPECIFIED: "UNSPECIFIED",
}

_KIND_BY_NAME: dict[str, int] = {name: kind for kind, name in _NAME_BY_KIND.items()}


def kind_name(kind: int) -> str:
    """The name of a `DTypeProto.Kind`, for messages: "F32"."""
    return _NAME_BY_KIND.get(kind, f"kind {kind}")


def kind_by_name(name: str) -> int:
    """The `DTypeProto.Kind` of a name, which is also that of XLA's primitive type: "F32".

    Raises:
        StatusError: UNIMPLEMENTED for any other name.
    """
    kind = _KIND_BY_NAME.get(name)
    if kind is None:
        raise status.unimplemented(f"Element type {name} is not supported here.").error()
    return kind


def dtype_of_kind(kind: int) -> np.dtype:
    """The numpy dtype of a `DTypeProto.Kind`.

    Raises:
        StatusError: INVALID_ARGUMENT for a kind without host values (tokens, opaque values) or an unknown
            one.
    """
    dtype = _DTYPE_BY_KIND.get(kind)
    if dtype is None:
        raise status.invalid_argument(f"Element type {kind_name(kind)} has no host representation.").error()
    return dtype


def array_bytes(kind: int, shape: Sequence[int]) -> int:
    """Bytes of an array's elements, one copy of them; 0 for strings and for kinds without host values."""
    dtype = _DTYPE_BY_KIND.get(kind)
    return 0 if dtype is None or kind == KIND_STRING else math.prod(shape) * dtype.itemsize


def kind_of_dtype(dtype: np.dtype | type) -> int:
    """The `DTypeProto.Kind` of a numpy dtype.

    Raises:
        StatusError: INVALID_ARGUMENT if IFRT has no such type.
    """
    dtype = np.dtype(dtype)
    kind = _KIND_BY_DTYPE.get(dtype)
    if kind is not None:
        return kind
    if dtype.char == STRING_DTYPE.char:
        return KIND_STRING
    # Numpy tells dtypes of other byte orders apart, and platforms' aliases of the same integer.
    kind = _KIND_BY_DTYPE.get(np.dtype(dtype.str)) if dtype.kind in "biufc" else None
    if kind is None:
        raise status.invalid_argument(f"IFRT has no element type for numpy dtype {dtype}.").error()
    return kind


def kind_of_mlir(element_type: str) -> int:
    """The `DTypeProto.Kind` of an element type in MLIR text, such as "bf16", "ui8", "i1" or "complex<f32>".

    Raises:
        StatusError: UNIMPLEMENTED for any other text.
    """
    kind = _KIND_BY_MLIR.get(element_type)
    if kind is None:
        raise status.unimplemented(f"Element type {element_type!r} of a program is not supported.").error()
    return kind


def mlir_of_kind(kind: int) -> str:
    """The element type in MLIR text of a `DTypeProto.Kind`.

    Raises:
        StatusError: INVALID_ARGUMENT for kinds that MLIR tensors of jax do not hold.
    """
    text = _MLIR_BY_KIND.get(kind)
    if text is None:
        raise status.invalid_argument(f"Element type {kind_name(kind)} cannot be held by a tensor.").error()
    return text


def region_bytes(item_bytes: int, shape: Sequence[int], byte_strides: Sequence[int] | None) -> int:
    """Bytes of the smallest region that holds an array, from its first element to the end of its last.

    Raises:
        StatusError: INVALID_ARGUMENT for a negative dimension or stride, or if shape and strides differ in
            length.
    """
    if any(dim < 0 for dim in shape):
        raise status.invalid_argument(f"Shape {list(shape)} has a negative dimension.").error()
    if byte_strides is None:
        return item_bytes * math.prod(shape)
    if len(byte_strides) != len(shape):
        raise status.invalid_argument(
            f"Shape {list(shape)} has {len(shape)} dimensions, but {len(byte_strides)} byte strides."
        ).error()
    if 0 in shape:
        return 0
    last = 0
    for dim, stride in zip(shape, byte_strides, strict=True):
        if dim == 1:
            # Whatever stands there is never applied.
            continue
        if stride < 0:
            raise status.invalid_argument(f"Negative byte stride in {list(byte_strides)}.").error()
        last += (dim - 1) * stride
    return last + item_bytes


def decode_host_buffer(
    data: Buffer, dtype_kind: int, shape: tuple[int, ...], byte_strides: tuple[int, ...] | None = None
) -> np.ndarray:
    """The array that a host buffer holds, as a view of `data` without copying (strings are copied).

    Args:
        data: the minimal memory region of the array; the result is read-only if this is.
        dtype_kind: a `DTypeProto.Kind`.
        shape: dimensions of the array.
        byte_strides: bytes from one element to the next along each dimension; None for row-major.

    Returns:
        An array of `shape` and the kind's numpy dtype, with the given strides.

    Raises:
        StatusError: INVALID_ARGUMENT if the size does not fit shape, dtype and strides.
    """
    dtype = dtype_of_kind(dtype_kind)
    if dtype_kind == KIND_STRING:
        return _decode_strings(data, shape)
    size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
    expected = region_bytes(dtype.itemsize, shape, byte_strides)
    if size != expected:
        raise status.invalid_argument(
            f"A host buffer of {size} bytes does not fit an array of {kind_name(dtype_kind)}{list(shape)}"
            f"{'' if byte_strides is None else f' with byte strides {list(byte_strides)}'}, "
            f"which needs {expected} bytes."
        ).error()
    if byte_strides is None or size == 0:
        return np.ndarray(shape, dtype, data)
    return np.ndarray(shape, dtype, data, strides=byte_strides)


def encode_host_buffer(array: np.ndarray, byte_strides: tuple[int, ...] | None = None) -> bytes:
    """The bytes to send for `array`, laid out with `byte_strides` (row-major if None) in a minimal region.

    Bytes between the elements, which no element owns, are zero.

    Raises:
        StatusError: INVALID_ARGUMENT if the strides do not fit the shape or are negative.
    """
    if array.dtype.char == STRING_DTYPE.char:
        contents = messages.StringArrayContents()
        contents.strings.extend(text.encode() for text in array.ravel().tolist())
        return contents.SerializeToString()
    if byte_strides is None or (byte_strides == array.strides and array.flags.c_contiguous):
        return array.tobytes()
    size = region_bytes(array.itemsize, array.shape, byte_strides)
    if array.size == 0:
        return b""
    region = bytearray(size)
    np.ndarray(array.shape, array.dtype, region, strides=byte_strides)[...] = array
    return bytes(region)


def _decode_strings(data: Buffer, shape: tuple[int, ...]) -> np.ndarray:
    contents = messages.StringArrayContents()
    try:
        contents.ParseFromString(bytes(data))
    except DecodeError:
        problem = status.invalid_argument("A host buffer of strings is not a StringArrayContents message.")
        raise problem.error() from None
    count = region_bytes(1, shape, None)
    if len(contents.strings) != count:
        raise status.invalid_argument(
            f"A host buffer of {len(contents.strings)} strings does not fit an array of STRING{list(shape)}, "
            f"which needs {count}."
        ).error()
    try:
        texts = [text.decode() for text in contents.strings]
    except UnicodeDecodeError as error:
        problem = status.invalid_argument(f"A string of a host buffer is not valid UTF-8: {error}.")
        raise problem.error() from None
    return np.array(texts, dtype=STRING_DTYPE).reshape(shape)
