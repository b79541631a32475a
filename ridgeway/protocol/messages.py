"""Message classes of the IFRT proxy protocol, made on first use from the installed jaxlib's own description.

`from ridgeway.protocol.messages import IfrtRequest` makes the class at import; `messages.IfrtRequest` on
first use. They are typed `Any`, since their fields are known only at run time; `message_class` gives any
other message.
"""

import functools
from typing import TYPE_CHECKING, Any

from google.protobuf import message_factory

from ridgeway.protocol import descriptors, versions

# gRPC service, its messages and the session's two envelopes.
GrpcGetVersionRequest: Any
GrpcGetVersionResponse: Any
GrpcIfrtSessionMetadata: Any
GrpcHostBufferStoreMetadata: Any
GrpcHostBufferStoreRequest: Any
GrpcHostBufferStoreResponse: Any
GrpcHostBufferLookupRequest: Any
GrpcHostBufferLookupResponse: Any
GrpcHostBufferDeleteRequest: Any
GrpcHostBufferDeleteResponse: Any
GrpcHostBufferReadFromDiskRequest: Any
GrpcHostBufferReadFromDiskResponse: Any
IfrtRequest: Any
IfrtResponse: Any

# Bodies of requests and responses which are made or kept on their own.
InitResponse: Any
CompileResponse: Any
LoadedExecutableExecuteRequest: Any
LoadedExecutableExecuteResponse: Any
LoadedExecutableMetadataResponse: Any

# Values inside requests.
ArraySpecProto: Any
AttributeMapProto: Any
DTypeProto: Any
DeviceListProto: Any
ExecuteOptionsProto: Any
RemapPlanProto: Any
Serialized: Any
ShapeProto: Any
ShardingProto: Any
StatusProto: Any
StringArrayContents: Any

# Contents of tagged blobs.
ConcreteEvenShardingProto: Any
ConcreteShardingProto: Any
CustomCallCompileOptionsProto: Any
CustomCallProgramProto: Any
HloShardingProto: Any
OpaqueShardingProto: Any
PjRtLayoutProto: Any
SingleDeviceShardingProto: Any
XlaCompileOptionsProto: Any
XlaHostCallbackProto: Any

# XLA's own messages.
CompileOptionsProto: Any
CompiledMemoryStatsProto: Any
DeviceAssignmentProto: Any
HloModuleProto: Any
GlobalTopologyProto: Any
LocalTopologyProto: Any
LayoutProto: Any
OpSharding: Any
XlaShapeProto: Any

# The profiler's: what a trace consists of, and what it is asked for.
ProfileOptions: Any
XSpace: Any

#: Full name of the gRPC service.
SERVICE_NAME = "xla.ifrt.proxy.GrpcIfrtService"

_PROXY = "xla.ifrt.proxy."
_IFRT = "xla.ifrt."
_FULL_NAMES: dict[str, str] = {
    **{
        name: _PROXY + name
        for name in (
            "GrpcGetVersionRequest",
            "GrpcGetVersionResponse",
            "GrpcIfrtSessionMetadata",
            "GrpcHostBufferStoreMetadata",
            "GrpcHostBufferStoreRequest",
            "GrpcHostBufferStoreResponse",
            "GrpcHostBufferLookupRequest",
            "GrpcHostBufferLookupResponse",
            "GrpcHostBufferDeleteRequest",
            "GrpcHostBufferDeleteResponse",
            "GrpcHostBufferReadFromDiskRequest",
            "GrpcHostBufferReadFromDiskResponse",
            "IfrtRequest",
            "IfrtResponse",
            "InitResponse",
            "CompileResponse",
            "LoadedExecutableExecuteRequest",
            "LoadedExecutableExecuteResponse",
            "LoadedExecutableMetadataResponse",
        )
    },
    **{
        name: _IFRT + name
        for name in (
            "ArraySpecProto",
            "AttributeMapProto",
            "DTypeProto",
            "DeviceListProto",
            "ExecuteOptionsProto",
            "RemapPlanProto",
            "Serialized",
            "ShapeProto",
            "ShardingProto",
            "ConcreteEvenShardingProto",
            "ConcreteShardingProto",
            "CustomCallCompileOptionsProto",
            "CustomCallProgramProto",
            "HloShardingProto",
            "OpaqueShardingProto",
            "PjRtLayoutProto",
            "SingleDeviceShardingProto",
            "XlaCompileOptionsProto",
            "XlaHostCallbackProto",
        )
    },
    **{
        name: "xla." + name
        for name in (
            "CompileOptionsProto",
            "CompiledMemoryStatsProto",
            "DeviceAssignmentProto",
            "HloModuleProto",
            "GlobalTopologyProto",
            "LocalTopologyProto",
            "LayoutProto",
            "OpSharding",
        )
    },
    "XlaShapeProto": "xla.ShapeProto",
    "StatusProto": "tensorflow.StatusProto",
    "ProfileOptions": "tensorflow.ProfileOptions",
    "XSpace": "tensorflow.profiler.XSpace",
    "StringArrayContents": "xla.ifrt.proto.StringArrayContents",
}


@functools.cache
def message_class(full_name: str) -> Any:
    """The class of the message `full_name`, such as "xla.ifrt.proxy.IfrtRequest" or a nested "xla.ifrt.A.B".

    Raises:
        DescriptorError: the installed jaxlib does not describe that message.
    """
    pool = descriptors.load_pool()
    try:
        descriptor = pool.FindMessageTypeByName(full_name)
    except KeyError:
        raise descriptors.DescriptorError(
            f"The installed jaxlib {descriptors.jaxlib_version()} does not describe the message {full_name}. "
            f"Ridgeway supports jax and jaxlib {versions.SUPPORTED_JAX}; install one of those."
        ) from None
    return message_factory.GetMessageClass(descriptor)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        full_name = _FULL_NAMES.get(name)
        if full_name is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Kept as an ordinary global, so that the next use costs no call.
        value = globals()[name] = message_class(full_name)
        return value
