"""Colocated Python functions as a host runs them, with jax's own serialization, on local devices."""

import jax
import numpy as np
import pytest
from jax.experimental.colocated_python import func, func_backend, obj, serialization

from ridgeway.protocol.status import RETRIED_CODES, Code, data_loss
from ridgeway.worker import python_functions
from ridgeway.worker.device_runtime import Runtime


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    """jax's own CPU devices, under ids from 10."""
    devices = jax.devices("cpu")
    return Runtime(0, devices[0].client, {10 + index: device for index, device in enumerate(devices)})


def spec_of(shape, dtype, device):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def pickled(function, inputs, outputs):
    """What jax pickles for a function of such arguments and results (both trees)."""
    in_specs, in_tree = jax.tree_util.tree_flatten((inputs, {}))
    out_specs, out_tree = jax.tree_util.tree_flatten(outputs)
    devices = in_specs[0].sharding._internal_device_list
    return serialization._serialize((function, in_tree, tuple(in_specs), out_tree, tuple(out_specs), devices))


def test_arguments_and_results_are_trees(runtime):
    device = runtime.device(10)
    spec = spec_of((2,), np.float32, device)

    def swap(pair, other):
        return {"sum": pair["a"] + pair["b"], "other": [other]}

    data = pickled(swap, ({"a": spec, "b": spec}, spec), {"sum": spec, "other": [spec]})
    function = python_functions.Function("swap", data)
    shards = [{10: np.full(2, value, np.float32)} for value in (1, 2, 5)]
    arguments = [function.argument(index, shard, runtime) for index, shard in enumerate(shards)]
    found = function.call(arguments, runtime)
    assert [{d: a.tolist() for d, a in shards.items()} for shards in found] == [{10: [5.0, 5.0]}, {10: [3.0, 3.0]}]
    assert function.objects == frozenset()


@pytest.mark.parametrize("dtype", ["int64", "float64", "bfloat16", "bool", "complex64", "int4"])
def test_types_arrive_as_they_are(runtime, dtype):
    """Also those that jax narrows where wide types are not enabled."""
    spec = spec_of((3,), jax.numpy.dtype(dtype), runtime.device(10))
    function = python_functions.Function("same", pickled(lambda x: x, (spec,), spec))
    value = np.array([0, 1, 1]).astype(spec.dtype)
    [found] = function.call([function.argument(0, {10: value}, runtime)], runtime)
    assert found[10].dtype == spec.dtype and found[10].tolist() == value.tolist()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda x: (x, x), "its output spec says"),
        (lambda x: np.zeros(2, np.float32), "result 0 is a ndarray; colocated Python returns jax.Arrays"),
        (lambda x: x[:1], "result 0 is float32[1]; its output spec says float32[2]"),
        (lambda x: x.astype(np.int32), "result 0 is int32[2]; its output spec says float32[2]"),
    ],
)
def test_what_does_not_fit_the_output_specs_is_refused(runtime, result, words):
    spec = spec_of((2,), np.float32, runtime.device(10))
    function = python_functions.Function("wrong", pickled(result, (spec,), spec))
    argument = function.argument(0, {10: np.zeros(2, np.float32)}, runtime)
    with pytest.raises(python_functions.WrongResult) as caught:
        function.call([argument], runtime)
    assert words in str(caught.value)
    assert python_functions.describe_error(caught.value, "colocated Python 'wrong'").code is Code.INVALID_ARGUMENT


def test_methods_are_known_by_their_object(runtime, monkeypatch):
    """jax keeps an object's id and a method's name in closures, also inside what it wraps around the first call."""
    made = []
    monkeypatch.setattr(
        func, "_compile_to_executable",
        lambda name, fun, *rest, **more: made.append(fun) or (lambda *args: (_ for _ in ()).throw(StopIteration)),
    )  # fmt: skip

    class Counter:
        def __init__(self):
            self.count = 0

        def add(self, x):
            return x

    wrapped = obj.wrap_class(Counter, None)()
    array = jax.device_put(np.float32(1), runtime.device(10))
    with pytest.raises(StopIteration):
        wrapped.add(array)  # pyright: ignore[reportAttributeAccessIssue]
    spec = spec_of((), np.float32, runtime.device(10))
    [first_call] = made
    for fun in (first_call, inner_of(first_call)):
        function = python_functions.Function("unknown", pickled(fun, (spec,), spec))
        assert function.name == "Counter.add"
        assert function.objects == {wrapped._colocated_python_uid}  # pyright: ignore[reportAttributeAccessIssue]


def inner_of(lowered):
    """The function that jax wraps for a first call."""
    return next(c.cell_contents for c in lowered.__closure__ if isinstance(c.cell_contents, func.FunctionInfo)).fun


def test_a_result_that_is_not_here_any_more_is_told_from_a_mistake():
    with pytest.raises(ValueError) as caught:
        func_backend.SINGLETON_RESULT_STORE.pop(123)
    assert python_functions.is_lost_result(caught.value)
    with pytest.raises(ValueError) as caught:
        raise ValueError("uid 123 does not exist")
    assert not python_functions.is_lost_result(caught.value)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_first_call_can_be_repeated(runtime, wrapped):
    """Also when its result was not fetched, as when another host had failed; and what nobody fetches does not stay."""
    device = runtime.device(10)
    spec = spec_of((), np.float32, device)
    specialization = func.Specialization().update(
        in_specs_treedef=jax.tree_util.tree_structure(((spec,), {})), in_specs_leaves=(spec,), devices=[device]
    )
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(func, "_compile_to_executable", lambda name, fun, **rest: made.append((fun, rest)))
        func._make_output_specs_and_push_result_fun(func.FunctionInfo(lambda x: x, None, None), specialization, 4711)
    [(fun, rest)] = made
    if wrapped:
        fun = func._make_prng_wrapped_fun(fun, {}, {})
    out_specs = jax.tree_util.tree_unflatten(rest["out_specs_treedef"], rest["out_specs_leaves"])
    function = python_functions.Function("f", pickled(fun, (spec,), out_specs))
    store = func_backend.SINGLETON_RESULT_STORE
    for _ in range(2):
        function.call([function.argument(0, {10: np.float32(3)[...]}, runtime)], runtime)
    assert [float(leaf) for leaf in store._storage[4711]] == [3.0]
    function.forget_result()
    assert 4711 not in store._storage


def test_errors_say_type_text_and_place_and_are_not_retried():
    def inner():
        raise RuntimeError("INTERNAL: " + "x" * 100_000)

    with pytest.raises(RuntimeError) as caught:
        inner()
    status = python_functions.describe_error(caught.value, "colocated Python 'f' on slice 1 host 0")
    assert status.code is Code.UNKNOWN
    assert status.message.startswith("colocated Python 'f' on slice 1 host 0 raised RuntimeError: internal: xxx")
    assert "in inner" in status.message
    assert len(status.message) < 4000
    assert not any(code.name in status.message for code in RETRIED_CODES)


def test_out_of_memory_is_no_mistake_of_an_unknown_kind():
    assert python_functions.describe_error(MemoryError(), "f").code is Code.RESOURCE_EXHAUSTED
    assert data_loss("x").code in RETRIED_CODES
