"""Which Python compiled the functions in a pickle."""

import gc
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from ridgeway.worker.python_code import OWN, UNKNOWN, foreign_version, version_of

OTHER = {"3.12": "3.13", "3.13": "3.12"}.get(OWN, "3.12")
#: The beginnings of code, by version: plain functions, closures, functions with cells, generators.
BEGINNINGS = {
    "3.12": ["9700", "9501 9700", "8701 9700", "9502 8701 4b00 0100 9700"],
    "3.13": ["9500", "3e01 9500", "5e01 9500", "3e02 5e01 2300 2000 9500"],
}


def make_closure(value: Any) -> Callable[[], Any]:
    def closure() -> Any:
        return value

    return closure


def make_generator(value: Any) -> Any:
    def generator() -> Any:
        yield value
        value.append(lambda: value)

    return generator


class Held:
    """An object with a function."""

    def __init__(self, value: Any) -> None:
        self.value = value


def foreign(pickled: bytes) -> bytes:
    """A pickle of `only_here`, as if the other Python had made it."""
    code = only_here.__code__.co_code
    changed = pickled.replace(code, bytes.fromhex(BEGINNINGS[OTHER][0]) + code[2:])
    assert changed != pickled
    return changed


def only_here(a: int, b: int = 7, *rest: int) -> int:
    """Nothing else compiles to the same bytecode."""
    return a * 31 + b * 37 + sum(rest) * 41


@pytest.fixture(autouse=True)
def by_value() -> Any:
    """As what is defined in a user's program: its code travels."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def test_all_code_of_this_process_is_its_own() -> None:
    functions = [value for value in gc.get_objects() if isinstance(value, types.FunctionType)]
    assert len(functions) > 1000
    assert {version_of(function.__code__.co_code) for function in functions} == {OWN}


@pytest.mark.parametrize(("version", "begin"), [(v, b) for v, begins in BEGINNINGS.items() for b in begins])
def test_versions_are_told_apart_by_how_code_begins(version: str, begin: str) -> None:
    assert version_of(bytes.fromhex(begin) + b"\x53\x00\x53\x00") == version


def test_what_no_known_version_makes_is_of_another() -> None:
    assert version_of(b"\xff\x00\x53\x00") == version_of(b"") == UNKNOWN


@pytest.mark.parametrize("wrap", [lambda f: f, make_closure, make_generator, Held, lambda f: [Held(make_closure(f))]])
def test_code_is_found_wherever_a_pickle_holds_it(wrap: Callable[[Any], Any]) -> None:
    pickled = cloudpickle.dumps(wrap(only_here))
    assert foreign_version(pickled) is None
    assert foreign_version(foreign(pickled)) == OTHER
    inside = cloudpickle.dumps((cloudpickle.loads, foreign(cloudpickle.dumps(wrap(only_here)))))
    assert foreign_version(inside) == OTHER
    assert foreign_version(cloudpickle.dumps(cloudpickle.dumps(wrap(only_here)))) is None


def test_data_is_not_taken_for_code() -> None:
    looks_alike = (1, 2, 3, 4, 5, b"\x95\x00\x97\x00"), b"\x80 no pickle.", b"\x80\x05.", [1, 2, 3, 4, 5, 6, 7, b"x"]
    assert foreign_version(pickle.dumps(looks_alike)) is None
    assert foreign_version(b"no pickle at all") is None
