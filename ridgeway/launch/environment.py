"""What a program needs in its environment to use a cluster: exactly three variables.

jaxlib's proxy client offers only plain text or Google's ALTS as transport security, hence the third; without
it the client fails to connect.
"""

from collections.abc import Mapping

CREDENTIALS_VARIABLE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"


def proxy_variables(host: str, port: int) -> dict[str, str]:
    """The three variables for the proxy at an address."""
    return {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": f"grpc://{host}:{port}",
        CREDENTIALS_VARIABLE: "true",
    }


def command_environment(inherited: Mapping[str, str], host: str, port: int) -> dict[str, str]:
    """The environment of a command that is to use the cluster; everything else is inherited."""
    return {**inherited, **proxy_variables(host, port)}


def runtime_environment(inherited: Mapping[str, str], secret: str) -> dict[str, str]:
    """The environment of head and workers, which are no programs that use the cluster."""
    environment = {name: value for name, value in inherited.items() if name not in proxy_variables("", 0)}
    environment["RIDGEWAY_CLUSTER_SECRET"] = secret
    return environment


def export_lines(host: str, port: int) -> list[str]:
    """The variables as shell commands."""
    return [f"export {name}={value}" for name, value in proxy_variables(host, port).items()]
