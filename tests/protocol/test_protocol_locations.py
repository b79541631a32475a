"""Where arrays are kept, as requests say it."""

import pytest

from ridgeway.protocol.locations import check_name, parse_location
from ridgeway.protocol.status import Code, StatusError


@pytest.mark.parametrize(
    ("text", "shown", "kvstore"),
    [
        ("/a//b/", "/a/b", {"driver": "file", "path": "/a/b/"}),
        ("/", "/", {"driver": "file", "path": "/"}),
        ("file:///a b/c", "/a b/c", {"driver": "file", "path": "/a b/c/"}),
        ("gs://bucket/run/1/", "gs://bucket/run/1", {"driver": "gcs", "bucket": "bucket", "path": "run/1/"}),
        ("s3://bucket", "s3://bucket", {"driver": "s3", "bucket": "bucket", "path": ""}),
    ],
)
def test_a_location_is_what_tensorstore_calls_it(text: str, shown: str, kvstore: dict[str, str]) -> None:
    location = parse_location(text)
    assert (str(location), location.kvstore()) == (shown, kvstore)
    assert parse_location(shown) == location
    assert location.folder("w").kvstore()["path"] == kvstore["path"] + "w/"
    assert location.is_local == (kvstore["driver"] == "file")


@pytest.mark.parametrize("text", ["", "a/b", "~/a", "http://host/a", "gs:///a", "file://a", "memory://a"])
def test_other_places_are_refused(text: str) -> None:
    with pytest.raises(StatusError, match="cannot be kept at") as caught:
        parse_location(text)
    assert caught.value.status.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "/a", "a/", "a//b", "a\0b"])
def test_an_array_stays_in_its_location(name: str) -> None:
    with pytest.raises(StatusError, match="under the name"):
        check_name(name)


@pytest.mark.parametrize("name", ["w", "params.decoder.layers", "a/b", "..a"])
def test_names_that_orbax_gives(name: str) -> None:
    assert check_name(name) == name
