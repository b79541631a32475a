"""Where arrays are kept: the location and the name in a persistence request, as tensorstore wants them.

A location is an absolute path, ``file://``, ``gs://bucket/folder`` or ``s3://bucket/folder``; an array is the folder
``name`` in it.
"""

import dataclasses
from typing import Any

from ridgeway.protocol import status

_DRIVERS = {"gs": "gcs", "s3": "s3"}
KNOWN = "/absolute/path, file:///path, gs://bucket/path, s3://bucket/path"


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """A folder, local (or mounted everywhere under the same path) or of an object store."""

    driver: str
    """of tensorstore's key-value stores: "file", "gcs", "s3" """
    bucket: str
    """empty for "file" """
    path: str
    """with a slash at its end, or empty for the root of a bucket"""

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of the file system, where renaming is possible and atomic."""
        return self.driver == "file"

    def folder(self, name: str) -> "Location":
        """A folder in this one."""
        return dataclasses.replace(self, path=f"{self.path}{name}/")

    def kvstore(self) -> dict[str, Any]:
        """The JSON of a tensorstore key-value store."""
        found = {"driver": self.driver, "path": self.path}
        return found | {"bucket": self.bucket} if self.bucket else found

    def __str__(self) -> str:
        if self.is_local:
            return self.path.rstrip("/") or "/"
        scheme = next(scheme for scheme, driver in _DRIVERS.items() if driver == self.driver)
        return f"{scheme}://{self.bucket}/{self.path}".rstrip("/")


def parse_location(text: str) -> Location:
    """The location that a text names.

    Raises:
        StatusError: INVALID_ARGUMENT, it is neither an absolute path nor a known URL.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "file", text
    if scheme == "file" and rest.startswith("/"):
        parts = [part for part in rest.split("/") if part]
        return Location("file", "", f"/{'/'.join(parts)}/" if parts else "/")
    bucket, _, path = rest.partition("/")
    if scheme in _DRIVERS and bucket:
        path = path.strip("/")
        return Location(_DRIVERS[scheme], bucket, f"{path}/" if path else "")
    raise status.invalid_argument(f"Arrays cannot be kept at {text!r}; known are {KNOWN}.").error()


def check_name(name: str) -> str:
    """The name of an array, if it can be one.

    Raises:
        StatusError: INVALID_ARGUMENT, it is empty or would lie outside of its location.
    """
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise status.invalid_argument(f"An array cannot be kept under the name {name!r}.").error()
    return name
