"""Thousands of host buffers at once, as a restore makes them, while the head is too busy to take them up."""

import os
import signal

import e2e_harness as harness
from e2e_harness import Cluster

pytestmark = harness.MARKS

#: gRPC by itself drops calls at random when more than 1000 wait to be taken up.
COUNT = 4000


def test_puts_that_wait_for_a_busy_head_all_arrive(cluster: Cluster) -> None:
    """None is refused, and every array has its own value."""
    head = cluster.status()["head"]["pid"]
    with cluster.controller() as program:
        program.run("import jax, numpy as np; device = jax.devices()[0]; jax.device_put(1, device).block_until_ready()")
        os.kill(head, signal.SIGSTOP)
        try:
            # Returns although the head hears nothing: a put is told to it, not asked of it.
            program.run(f"arrays = [jax.device_put(np.float32(i), device) for i in range({COUNT})]")
        finally:
            os.kill(head, signal.SIGCONT)
        wrong = program.run("result = [i for i, a in enumerate(jax.device_get(arrays)) if a != i]")
        assert wrong == []


def test_thousands_of_arrays_in_host_memory_are_waited_for_at_once(cluster: Cluster) -> None:
    """More than Python's stack is deep: all their bytes are there before anybody asks."""
    before = cluster.host(0)
    with cluster.controller() as program:
        assert program.run("""
place = jax.sharding.SingleDeviceSharding(devices_of(0)[0], memory_kind="pinned_host")
arrays = [jax.device_put(np.full(8, i, np.float32), place) for i in range(1500)]
jax.block_until_ready(arrays)
result = float(arrays[-1][0])
""") == 1499
    assert cluster.went_on(before, cluster.host(0))


def test_a_controller_keeps_nothing_of_what_it_has_done(cluster: Cluster) -> None:
    """jaxlib's client keeps where a request came from until the server has let go of it."""
    with cluster.controller() as program:
        program.run("import gc, sys, jax; device = jax.devices()[0]; f = jax.jit(lambda x: x + 1)")
        program.run("x = jax.device_put(1.0, device)")
        # Errors are no answers in which the client is told anything; what they leave comes with the next one.
        rounds = "for _ in range({}):\n    float(f(x))\n    jax.block_until_ready(jax.device_put(2.0, device))\n"
        counted = "gc.collect(); result = sys.getallocatedblocks()"
        program.run(rounds.format(50))
        before = program.run(counted)
        program.run(rounds.format(500))
        # One block for each request would be more than a thousand.
        assert program.run(counted) - before < 300
