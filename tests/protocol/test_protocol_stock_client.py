"""A real, unmodified jax client against a server that speaks through `ridgeway.protocol`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from holding_proxy import HoldingProxy
from subprocesses import run_python

from ridgeway.protocol import descriptors, shardings, versions
from ridgeway.protocol.versions import ProxyVersion

# What the clients of these jaxlib releases offer, lowest and highest.
KNOWN_WINDOWS = {
    "0.11.0": (ProxyVersion(16, 0), ProxyVersion(25, 4)),
    "0.12.0.1": (ProxyVersion(16, 2), ProxyVersion(25, 6)),
}

CLIENT = Path(__file__).with_name("stock_client.py")


@pytest.fixture(scope="module")
def proxy() -> Iterator[HoldingProxy]:
    served = HoldingProxy(device_count=8)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def output(proxy: HoldingProxy) -> list[str]:
    return run_python(
        str(CLIENT),
        JAX_PLATFORMS="proxy",
        JAX_BACKEND_TARGET=f"grpc://127.0.0.1:{proxy.port}",
        IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS="true",
    ).splitlines()


def test_every_array_comes_back_as_it_went(output: list[str], proxy: HoldingProxy) -> None:
    assert proxy.failures == []
    assert output[:-1] == []
    assert int(output[-1]) > 200


@pytest.mark.usefixtures("output")
def test_the_clients_versions_are_the_declared_ones(proxy: HoldingProxy) -> None:
    lowest, highest = proxy.offered[0]
    known = KNOWN_WINDOWS.get(descriptors.jaxlib_version())
    assert known is None or known == (lowest, highest)
    chosen = versions.negotiate(lowest, highest)
    assert chosen.protocol == min(highest.protocol, versions.MAX_PROTOCOL_VERSION)
    assert chosen.serdes == min(highest.serdes, versions.MAX_SERDES_VERSION)


@pytest.mark.usefixtures("output")
def test_the_client_used_all_that_is_tested_here(proxy: HoldingProxy) -> None:
    seen = Counter(request.WhichOneof("request") for request in proxy.requests)
    assert seen["make_array_from_host_buffer_request"] > 100
    assert seen["make_arrays_from_host_buffer_shards_request"] > 10
    assert seen["copy_to_host_buffer_request"] > 100
    assert any(strides and 0 not in shape for _, shape, strides, _ in proxy.buffer_bytes)
    assert {name for name, _ in proxy.sharding_blobs} >= {shardings.HLO, shardings.SINGLE_DEVICE}
