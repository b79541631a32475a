"""Arrays in a store that cannot rename: the chunks first, what makes an array of them last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorstore")

SCENARIO = """
import os, sys
import numpy as np
from object_store import ObjectStore

store = ObjectStore()
os.environ |= {
    "TENSORSTORE_GCS_HTTP_URL": store.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    "AWS_ENDPOINT_URL": store.url, "AWS_REGION": "here", "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none",
}

from ridgeway.protocol import dtypes
from ridgeway.protocol.locations import parse_location
from ridgeway.protocol.status import StatusError
from ridgeway.worker.storage import StoredArray

VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)

def array(chunk=(4, 8)):
    return StoredArray(parse_location(sys.argv[1]), "w", dtypes.kind_by_name("F32"), (8, 8), chunk)

def read():
    try:
        return array(()).read((0, 0), (8, 8), lambda: 20.0)
    except StatusError as error:
        assert error.status.code.name == "FAILED_PRECONDITION", error
        return None

marks = {"run/1/w/.zarray", "run/1/w/zarr.json"}
first = array()
for row in (0, 4):
    first.write("1", (row, 0), VALUES[row : row + 4], lambda: 20.0)
    assert read() is None
assert sorted(store.objects) == ["run/1/w/0.0", "run/1/w/1.0"]
first.commit("1", lambda: 20.0)
assert set(store.objects) == marks | {"run/1/w/0.0", "run/1/w/1.0"}
assert (read() == VALUES).all()
posted = [name for method, name in store.requests if method in ("POST", "PUT")]
assert set(posted[-2:]) == marks and not marks & set(posted[:-2])

# Writing it again takes it away first: half of it is never an array.
second = array()
second.write("2", (0, 0), -VALUES[:4], lambda: 20.0)
assert read() is None
second.write("2", (4, 0), -VALUES[4:], lambda: 20.0)
second.commit("2", lambda: 20.0)
assert (read() == -VALUES).all()

store.refuse_writes_after = 0
try:
    array().write("3", (0, 0), VALUES[:4], lambda: 20.0)
except StatusError as error:
    print(error)
store.close()
"""


@pytest.mark.parametrize("location", ["gs://bucket/run/1", "s3://bucket/run/1"])
def test_an_array_in_an_object_store(location: str) -> None:
    # In a process of its own: tensorstore reads its environment once.
    folders = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    result = subprocess.run(
        [sys.executable, "-c", SCENARIO, location], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    refused = f"PERMISSION_DENIED: Array 'w' in {location} could not be written: "
    assert result.stdout.startswith(refused), result.stdout
