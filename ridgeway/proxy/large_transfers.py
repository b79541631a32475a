"""Host buffers that a client on the head's machine hands over as files instead of through gRPC.

jaxlib's client does so for buffers of at least ``IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES`` if
``IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY`` names a folder (in ``/dev/shm``, say): it writes
``lt_HANDLE`` there and asks the server to read it.  The head has to be told the same folder.  Handles begin at 1 in
every client, so that two of them in one folder would overwrite each other's files: one session at a time may use it.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ridgeway.protocol import status as statuses

FOLDER_VARIABLE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"


def folder_from(setting: str, environment: Mapping[str, str]) -> str:
    """The folder: what the setting says, else what the client's own variable says in the head's environment."""
    return setting or environment.get(FOLDER_VARIABLE, "")


class LargeTransfers:
    """Reads those files. ``is_open`` tells whether a session is still there."""

    def __init__(self, folder: str, is_open: Callable[[int], bool]):
        self._folder = folder
        self._is_open = is_open
        self._session: int | None = None

    async def read(self, session: int, handle: int, size: int, session_began: float) -> bytes:
        """The bytes of a host buffer; its file is removed, also when it is refused, and one from before the session
        began (seconds since 1970) is not this session's.

        Raises:
          StatusError: FAILED_PRECONDITION, no folder is set here or another session uses it; INVALID_ARGUMENT, there is
            no such file or it has another size.
        """
        if not self._folder:
            raise statuses.failed_precondition(
                f"{FOLDER_VARIABLE} is set in the client only: set it for the head too, or for neither"
            ).error()
        path = Path(self._folder) / f"lt_{handle}"
        if self._session != session:
            if self._session is not None and self._is_open(self._session):
                path.unlink(missing_ok=True)  # nobody may take it for its own
                raise statuses.failed_precondition(
                    f"session {self._session} uses {self._folder} for large transfers; "
                    f"unset {FOLDER_VARIABLE} in all clients but one"
                ).error()
            self._session = session
        try:
            data = await asyncio.to_thread(_take, path, size, session_began)
        except OSError as error:
            raise statuses.invalid_argument(
                f"host buffer {handle}: {path}: {error.strerror or error}; is {FOLDER_VARIABLE} the same folder for "
                "the head and the client?"
            ).error() from None
        if len(data) != size:
            raise statuses.invalid_argument(
                f"host buffer {handle}: {path} has another size than the {size} bytes that were announced"
            ).error()
        return data


def _take(path: Path, size: int, not_before: float) -> bytes:
    """The bytes of a file that is no link, none if it has another size; it is removed.

    Raises:
      OSError: there is none, or an older one.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        data = file.read(size) if about.st_size == size else b""
    path.unlink()
    if about.st_mtime < not_before:
        raise OSError(errno.ESTALE, "left by an earlier client")
    return data
