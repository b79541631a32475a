"""What a process says of itself when it joins a cluster."""

import importlib.metadata
import platform

import ridgeway


def hello_versions() -> dict[str, str]:
    """Versions of Ridgeway, jax, jaxlib and Python in this process, without importing any of them."""
    return {
        "ridgeway": ridgeway.__version__,
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
    }
