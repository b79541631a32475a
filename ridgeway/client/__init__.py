"""What runs in the user's process beside jax: found by jax through the entry point group ``jax_plugins``.

A stock client without it works too, but for host callbacks (`jax.pure_callback`, `jax.experimental.io_callback`,
`jax.debug.print` and their like), for Python that is called while a program is partitioned (`custom_partitioning`,
`jax.debug.inspect_array_sharding`), for host arrays with negative or zero strides, for some copies to the local CPU
and for the cluster's part of what `jax.profiler` records.  jax imports this in every process that has Ridgeway
installed, so it does nothing unless the ``proxy`` platform is asked for.
"""


def initialize() -> None:
    """Called by jax before it makes its backends."""
    import jax

    if "proxy" in (jax.config.jax_platforms or "").split(","):
        from ridgeway.client import (
            backend,
            compiler_callbacks,
            host_arrays,
            host_callbacks,
            local_copies,
            profiler_plugin,
        )

        backend.register()
        host_callbacks.install()
        compiler_callbacks.install()
        local_copies.install()
        host_arrays.install()
        profiler_plugin.install()
