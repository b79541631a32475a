"""A proxy server that only holds arrays, for a stock client to talk to.

It speaks the real protocol through `ridgeway.protocol` and keeps every array in host memory as numpy arrays,
one per shard; it runs no programs. What the client sent is kept for the tests to look at.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from ridgeway.protocol import dtypes, messages, shardings, status, versions

SESSION_ID = 7
WAIT_SECONDS = 20.0


@dataclass
class HeldArray:
    """An array as the server holds it: one numpy array per device of the sharding."""

    kind: int
    shape: tuple[int, ...]
    sharding: shardings.Sharding
    sharding_blob: bytes
    shards: list[np.ndarray]


class HoldingProxy:
    """Serves `device_count` devices on a free port of 127.0.0.1 until `stop`."""

    def __init__(self, device_count: int) -> None:
        self.device_count = device_count
        self.offered: list[tuple[versions.ProxyVersion, versions.ProxyVersion]] = []
        self.requests: list[Any] = []
        self.sharding_blobs: dict[tuple[str, bytes], None] = {}
        self.buffer_bytes: list[tuple[int, tuple[int, ...], tuple[int, ...] | None, bytes]] = []
        self.failures: list[str] = []
        self._arrays: dict[int, HeldArray] = {}
        self._buffers: dict[int, bytes] = {}
        self._buffer_came = threading.Condition()
        self._next_handle = 1 << 40
        self._server = grpc.server(
            futures.ThreadPoolExecutor(8),
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(messages.SERVICE_NAME, self._methods()),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait(WAIT_SECONDS)

    def _methods(self) -> dict[str, grpc.RpcMethodHandler]:
        def encode(message: Any) -> bytes:
            return message.SerializeToString()

        return {
            "GetVersion": grpc.unary_unary_rpc_method_handler(
                self._get_version, messages.GrpcGetVersionRequest.FromString, encode
            ),
            "IfrtSession": grpc.stream_stream_rpc_method_handler(
                self._session, messages.IfrtRequest.FromString, encode
            ),
            "HostBufferStore": grpc.stream_unary_rpc_method_handler(
                self._store, messages.GrpcHostBufferStoreRequest.FromString, encode
            ),
            "HostBufferLookup": grpc.unary_stream_rpc_method_handler(
                self._lookup, messages.GrpcHostBufferLookupRequest.FromString, encode
            ),
            "HostBufferDelete": grpc.unary_unary_rpc_method_handler(
                self._delete, messages.GrpcHostBufferDeleteRequest.FromString, encode
            ),
        }

    def _get_version(self, request: Any, context: grpc.ServicerContext) -> Any:
        lowest = versions.version_from_proto(request.min_version)
        highest = versions.version_from_proto(request.max_version)
        self.offered.append((lowest, highest))
        response = messages.GrpcGetVersionResponse()
        versions.fill_version_proto(response.version, versions.negotiate(lowest, highest))
        return response

    def _store(self, parts: Iterator[Any], context: grpc.ServicerContext) -> Any:
        metadata = dict(context.invocation_metadata())
        header = messages.GrpcHostBufferStoreMetadata.FromString(
            metadata["ifrt-proxy-grpc-host-buffer-store-metadata-bin"]
        )
        data = b"".join(part.data for part in parts)
        with self._buffer_came:
            self._buffers[header.handle] = data
            self._buffer_came.notify_all()
        return messages.GrpcHostBufferStoreResponse()

    def _buffer(self, handle: int) -> bytes:
        with self._buffer_came:
            if not self._buffer_came.wait_for(lambda: handle in self._buffers, WAIT_SECONDS):
                raise status.deadline_exceeded(f"host buffer {handle} did not arrive").error()
            return self._buffers[handle]

    def _lookup(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield messages.GrpcHostBufferLookupResponse(data=self._buffer(request.handle))

    def _delete(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._buffer_came:
            self._buffers.pop(request.handle, None)
        return messages.GrpcHostBufferDeleteResponse()

    def _session(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            self.requests.append(request)
            response = messages.IfrtResponse()
            response.response_metadata.op_id = request.request_metadata.op_id
            name = request.WhichOneof("request")
            try:
                handler: Callable[[Any, Any], None] = getattr(self, f"_on_{name}", self._on_unknown)
                body = getattr(response, name.replace("_request", "_response"))
                body.SetInParent()
                handler(getattr(request, name), body)
                status.fill_status_proto(response.response_metadata.status, status.OK)
            except status.StatusError as error:
                self.failures.append(f"{name}: {error}")
                status.fill_status_proto(response.response_metadata.status, error.status)
            except Exception as error:
                self.failures.append(f"{name}: {error!r}")
                status.fill_status_proto(response.response_metadata.status, status.internal(f"{name}: {error!r}"))
            yield response

    # One method for each request the tests' clients make.

    def _on_unknown(self, request: Any, body: Any) -> None:
        raise status.unimplemented(f"{type(request).__name__} is not served here").error()

    def _on_init_request(self, request: Any, body: Any) -> None:
        body.session_id = SESSION_ID
        body.platform_name = "cpu"
        body.platform_version = "holding"
        body.platform_id = 1
        body.runtime_type = "pathways"
        for device_id in range(self.device_count):
            device = body.all_devices.add(
                id=device_id,
                local_device_id=device_id,
                local_hardware_id=device_id,
                platform_name="cpu",
                device_kind="cpu",
                default_memory_id=device_id,
                debug_string=f"device {device_id}",
                to_string=f"device {device_id}",
            )
            device.memory_ids.append(device_id)
            body.primary_device_ids.append(device_id)
            body.addressable_device_ids.append(device_id)
            memory = body.memories.add(
                id=device_id, memory_space_kind="device", kind_id=1, debug_string="m", to_string="m"
            )
            memory.device_ids.append(device_id)

    def _on_get_default_layout_request(self, request: Any, body: Any) -> None:
        layout = messages.PjRtLayoutProto()
        layout.xla_layout.minor_to_major.extend(reversed(range(len(request.dims))))
        body.serialized_pjrt_layout = layout.SerializeToString()

    def _parse_sharding(self, proto: Any) -> tuple[shardings.Sharding, bytes]:
        serialized = proto.serialized_sharding
        self.sharding_blobs[serialized.type_name, serialized.data] = None
        return shardings.parse(proto), proto.SerializeToString()

    def _read(self, spec: Any) -> np.ndarray:
        shape = tuple(spec.shape.dims)
        strides = tuple(spec.byte_strides.strides) if spec.HasField("byte_strides") else None
        data = self._buffer(spec.host_buffer_handle)
        self.buffer_bytes.append((spec.dtype.kind, shape, strides, data))
        return dtypes.decode_host_buffer(data, spec.dtype.kind, shape, strides)

    def _hold(self, handle: int, array: HeldArray) -> int:
        if not handle:
            handle = self._next_handle
            self._next_handle += 1
        self._arrays[handle] = array
        return handle

    def _on_make_array_from_host_buffer_request(self, request: Any, body: Any) -> None:
        sharding, blob = self._parse_sharding(request.sharding)
        value = self._read(request)
        shape = tuple(request.shape.dims)
        shards = [value[domain] for domain in sharding.index_domains(shape)]
        held = HeldArray(request.dtype.kind, shape, sharding, blob, shards)
        body.array_handle = self._hold(request.array_handle, held)

    def _on_make_arrays_from_host_buffer_shards_request(self, request: Any, body: Any) -> None:
        for position, spec in enumerate(request.specs):
            sharding, blob = self._parse_sharding(spec.array_spec.sharding)
            shape = tuple(spec.array_spec.shape.dims)
            shards: list[Any] = [None] * len(sharding.devices)
            for indices, buffer in zip(spec.addressable_shard_indices, spec.host_buffers, strict=True):
                value = self._read(buffer)
                for index in indices.indices:
                    shards[index] = value
            if [shard.shape for shard in shards] != list(sharding.shard_shapes(shape)):
                raise status.internal(f"shards {[s.shape for s in shards]} are not those of {sharding}").error()
            held = HeldArray(spec.array_spec.dtype.kind, shape, sharding, blob, shards)
            wanted = request.array_handles[position] if request.array_handles else 0
            body.array_handles.append(self._hold(wanted, held))

    def _on_assemble_array_from_single_device_arrays_request(self, request: Any, body: Any) -> None:
        sharding, blob = self._parse_sharding(request.sharding)
        shape = tuple(request.shape.dims)
        parts = [self._arrays[handle] for handle in request.single_device_array_handles]
        shards = [part.shards[0] for part in parts]
        if [shard.shape for shard in shards] != list(sharding.shard_shapes(shape)):
            raise status.internal(f"shards {[s.shape for s in shards]} are not those of {sharding}").error()
        if [part.sharding.devices[0] for part in parts] != list(sharding.devices):
            raise status.internal("parts are not on the devices of the whole").error()
        held = HeldArray(request.dtype.kind, shape, sharding, blob, shards)
        body.array_handle = self._hold(request.result_handle, held)

    def _on_disassemble_into_single_device_arrays_request(self, request: Any, body: Any) -> None:
        array = self._arrays[request.array_handle]
        for position, (device, shard) in enumerate(zip(array.sharding.devices, array.shards, strict=True)):
            proto = messages.ShardingProto.FromString(
                shardings.single_device_sharding_proto(device, array.sharding.memory_kind)
            )
            sharding, blob = self._parse_sharding(proto)
            held = HeldArray(array.kind, shard.shape, sharding, blob, [shard])
            wanted = request.result_handles[position] if request.result_handles else 0
            body.array_handles.append(self._hold(wanted, held))

    def _on_fully_replicated_shard_request(self, request: Any, body: Any) -> None:
        array = self._arrays[request.array_handle]
        if not array.sharding.is_fully_replicated:
            raise status.invalid_argument(f"{array.sharding} is not replicated").error()
        blob = shardings.single_device_sharding_proto(array.sharding.devices[0], array.sharding.memory_kind)
        sharding, blob = self._parse_sharding(messages.ShardingProto.FromString(blob))
        held = HeldArray(array.kind, array.shape, sharding, blob, array.shards[:1])
        body.array_handle = self._hold(request.result_handle, held)

    def _on_copy_to_host_buffer_request(self, request: Any, body: Any) -> None:
        array = self._arrays[request.array_handle]
        strides = tuple(request.byte_strides.strides) if request.HasField("byte_strides") else None
        data = dtypes.encode_host_buffer(array.shards[0], strides)
        with self._buffer_came:
            self._buffers[request.host_buffer_handle] = data
            self._buffer_came.notify_all()

    def _on_check_value_ready_request(self, request: Any, body: Any) -> None:
        for handle in request.value_handles:
            if handle not in self._arrays:
                raise status.internal(f"no array {handle}").error()

    def _on_destruct_array_request(self, request: Any, body: Any) -> None:
        for handle in request.array_handle:
            self._arrays.pop(handle, None)

    def _on_delete_array_request(self, request: Any, body: Any) -> None:
        self._on_destruct_array_request(request, body)

    def _on_is_array_deleted_request(self, request: Any, body: Any) -> None:
        body.deleted = request.array_handle not in self._arrays
