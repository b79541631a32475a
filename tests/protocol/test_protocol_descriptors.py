import random
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from subprocesses import run_python

from ridgeway.protocol import descriptors, messages, versions


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ridgeway"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries that were read, as opposed to the cache."""
    seen: list[Path] = []
    read = descriptors._read_library

    def recording(path: Path) -> list[descriptor_pb2.FileDescriptorProto]:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(descriptors, "_read_library", recording)
    return seen


def names(files: list[descriptor_pb2.FileDescriptorProto]) -> list[str]:
    return [file.name for file in files]


@pytest.mark.parametrize("name", sorted(messages._FULL_NAMES))
def test_every_named_message_is_described(name: str) -> None:
    made = getattr(messages, name)
    assert made.DESCRIPTOR.full_name == messages._FULL_NAMES[name]
    assert made.FromString(made().SerializeToString()) == made()
    assert getattr(messages, name) is made


def test_every_declared_name_can_be_made() -> None:
    declared = {name for name in messages.__annotations__ if name[0].isupper() and name != "SERVICE_NAME"}
    assert declared == set(messages._FULL_NAMES)


def test_an_unknown_message_is_named() -> None:
    with pytest.raises(descriptors.DescriptorError, match=r"jaxlib .* does not describe the message xla\.Nothing"):
        messages.message_class("xla.Nothing")
    with pytest.raises(AttributeError, match="Nothing"):
        messages.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_pool_is_not_the_default_one() -> None:
    assert descriptors.load_pool() is descriptors.load_pool()
    assert descriptors.load_pool() is not descriptor_pool.Default()
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("xla.ifrt.proxy.IfrtRequest")


def test_the_second_load_comes_from_the_cache(cache: Path, reads: list[Path]) -> None:
    first = descriptors.load_files()
    assert len(reads) == 1
    assert len(list(cache.iterdir())) == 1
    assert descriptors.load_files() == first
    assert len(reads) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_cache_is_ignored_and_written_anew(cache: Path, reads: list[Path], damage: str) -> None:
    first = descriptors.load_files()
    (path,) = cache.iterdir()
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "cut": good[:middle],
            "flipped": good[:middle] + bytes([good[middle] ^ 0x40]) + good[middle + 1 :],
            "empty": b"",
            "other": b"something else\n" * 20,
        }[damage]
    )
    assert descriptors.load_files() == first
    assert len(reads) == 2
    assert path.read_bytes() == good


def test_a_cache_of_another_release_is_not_used(
    cache: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors.load_files()
    monkeypatch.setattr(descriptors, "jaxlib_version", lambda: "0.12.99")
    descriptors.load_files()
    assert len(reads) == 2
    assert len(list(cache.iterdir())) == 2


def test_without_a_place_for_the_cache_the_library_is_read(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert "xla/python/ifrt_proxy/common/ifrt_service.proto" in names(descriptors.load_files())
    assert len(reads) == 1


def test_another_library_layout_is_found_by_scanning(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_LIBRARY_NAME", "libnothing.so")
    assert "xla/python/ifrt_proxy/common/ifrt_service.proto" in names(descriptors.load_files())


@pytest.mark.usefixtures("cache")
def test_a_missing_message_names_jaxlib_and_the_supported_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libjax_common.so"
    # Everything is there but the requests.
    file = descriptor_pb2.FileDescriptorProto(name="xla/python/ifrt/x.proto", package="xla.ifrt")
    file.message_type.add(name="HloShardingProto")
    library.write_bytes(b"\x7fELF" + file.SerializeToString() + b"\0\0")
    monkeypatch.setattr(descriptors, "library_candidates", lambda: [library])
    with pytest.raises(descriptors.DescriptorError) as caught:
        descriptors.load_files()
    message = str(caught.value)
    assert "xla.ifrt.proxy.IfrtRequest" in message
    assert "xla.ifrt.HloShardingProto" not in message
    assert descriptors.jaxlib_version() in message
    assert versions.SUPPORTED_JAX in message
    assert str(library) in message


def test_descriptions_are_found_between_other_bytes() -> None:
    generator = random.Random(7)
    files = []
    for number in range(12):
        file = descriptor_pb2.FileDescriptorProto(name=f"xla/some/file_{number}.proto", package="xla.some")
        if number:
            file.dependency.append(f"xla/some/file_{generator.randrange(number)}.proto")
            if number % 3 == 0:
                file.public_dependency.append(0)
        for index in range(generator.randrange(1, 4)):
            message = file.message_type.add(name=f"Message{index}")
            message.field.add(name="value", number=1, type="TYPE_INT64", label="LABEL_OPTIONAL")
        if number % 4 == 1:
            file.syntax = "proto3"
        elif number % 4 == 2:
            file.syntax = "editions"
            file.edition = descriptor_pb2.EDITION_2023
        files.append(file)
    for _ in range(50):
        data = bytearray(b"\0")
        for file in files:
            data += file.SerializeToString()
            # Others follow directly, or bytes that may look like a further field. Without a syntax only a
            # field that cannot follow ends a file.
            fillers = [b"", b"\0\0", b"\0" + generator.randbytes(40), b"\x0a\x03abc"]
            data += generator.choice([*fillers, b"\x22\x02ab"] if file.syntax else fillers)
        data += files[0].SerializeToString()[:-3]
        found = descriptors.extract(bytes(data))
        assert found == {file.name: file for file in files}


def test_a_file_whose_dependency_is_missing_is_left_out() -> None:
    def make(name: str, *needs: str) -> descriptor_pb2.FileDescriptorProto:
        return descriptor_pb2.FileDescriptorProto(name=name, dependency=needs)

    files = [
        make("xla/python/ifrt/a.proto", "xla/b.proto"),
        make("xla/b.proto"),
        make("xla/python/ifrt/c.proto", "xla/python/ifrt/d.proto"),
        make("xla/python/ifrt/d.proto", "xla/missing.proto"),
        make("xla/python/ifrt/e.proto", "xla/python/ifrt/f.proto"),
        make("xla/python/ifrt/f.proto", "xla/python/ifrt/e.proto"),
    ]
    found = descriptors._needed({file.name: file for file in files})
    assert names(found) == ["xla/b.proto", "xla/python/ifrt/a.proto"]


def test_the_protocol_is_loaded_without_jax() -> None:
    program = (
        "import sys\n"
        "from ridgeway.protocol import dtypes, messages, shardings, status, versions\n"
        "messages.IfrtRequest, messages.OpSharding\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & {'jax', 'jaxlib'}\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "assert not loaded, loaded\n"
        "assert 'libjax_common' not in maps\n"
    )
    run_python("-c", program)
