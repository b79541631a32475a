"""A client of the server's port that sends what no client should: the protocol's own messages with anything in them."""

import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from ridgeway.protocol import messages, shardings

SERVICE = f"/{messages.SERVICE_NAME}/"
SESSION_HEADER = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
BUFFER_HEADER = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
F32 = 11

_INTEGERS = (0, 1, 2, 3, 4, 5, 7, 8, 99, 1 << 20, (1 << 31) - 1)
_SIGNED = {
    FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_SINT64, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_SFIXED64,
}  # fmt: skip


class PortClient:
    """One session, or an attempt at one."""

    def __init__(self, port: int):
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)])
        asked = messages.GrpcGetVersionRequest()
        asked.min_version.protocol_version, asked.max_version.protocol_version = 1, 1 << 20
        asked.max_version.ifrt_serdes_version_number = 1 << 20
        version = messages.GrpcGetVersionResponse.FromString(
            self._channel.unary_unary(SERVICE + "GetVersion")(asked.SerializeToString(), timeout=30)
        ).version
        metadata = messages.GrpcIfrtSessionMetadata()
        metadata.version.CopyFrom(version)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stream = self._channel.stream_stream(SERVICE + "IfrtSession")(
            iter(self._outgoing.get, None), metadata=[(SESSION_HEADER, metadata.SerializeToString())]
        )
        self.answers: dict[int, Any] = {}
        self.ended = threading.Event()
        self.end: grpc.StatusCode | None = None
        self._next = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for data in self._stream:
                response = messages.IfrtResponse.FromString(data)
                self.answers[response.response_metadata.op_id] = response
        except grpc.RpcError as error:
            self.end = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        self.ended.set()

    def send_bytes(self, data: bytes) -> None:
        """Send anything as a request."""
        self._outgoing.put(data)

    def send(self, kind: str, body: Any) -> int:
        """Send a request; returns its number."""
        self._next += 1
        request = messages.IfrtRequest()
        request.request_metadata.op_id = self._next
        getattr(request, kind).SetInParent()
        getattr(request, kind).MergeFrom(body)
        self.send_bytes(request.SerializeToString())
        return self._next

    def body(self, kind: str) -> Any:
        """An empty request of a kind."""
        return type(getattr(messages.IfrtRequest(), kind))()

    def make_array(self, session: int, handle: int, device: int, data: bytes = bytes(16)) -> None:
        """A real array f32[n] of some bytes under a handle, which the host buffer has too."""
        header = messages.GrpcHostBufferStoreMetadata(session_id=session, handle=handle, buffer_size=len(data))
        chunk = messages.GrpcHostBufferStoreRequest(data=data).SerializeToString()
        self._channel.stream_unary(SERVICE + "HostBufferStore")(
            iter([chunk]), metadata=[(BUFFER_HEADER, header.SerializeToString())], timeout=30
        )
        body = self.body("make_array_from_host_buffer_request")
        body.dtype.kind = F32
        body.shape.dims.append(len(data) // 4)
        body.sharding.MergeFromString(shardings.single_device_sharding_proto(device))
        body.host_buffer_handle = body.array_handle = handle
        self.send("make_array_from_host_buffer_request", body)

    def look_up(self, session: int, handle: int) -> bytes:
        """The bytes of a host buffer that the server has filled."""
        request = messages.GrpcHostBufferLookupRequest(session_id=session, handle=handle)
        stream = self._channel.unary_stream(SERVICE + "HostBufferLookup")(request.SerializeToString(), timeout=60)
        return b"".join(messages.GrpcHostBufferLookupResponse.FromString(chunk).data for chunk in stream)

    def store(self, session: int, handle: int, announced: int, chunks: list[bytes]) -> grpc.StatusCode:
        """Store a host buffer; returns how that ended."""
        header = messages.GrpcHostBufferStoreMetadata(session_id=session, handle=handle, buffer_size=announced)
        return self.call("HostBufferStore", iter(chunks), header.SerializeToString())

    def call(self, method: str, requests: Iterator[bytes], header: bytes) -> grpc.StatusCode:
        """Any other method with a stream of messages; returns how that ended."""
        try:
            self._channel.stream_unary(SERVICE + method)(requests, metadata=[(BUFFER_HEADER, header)], timeout=30)
        except grpc.RpcError as error:
            return error.code()  # pyright: ignore[reportAttributeAccessIssue]
        return grpc.StatusCode.OK

    def call_one(self, method: str, request: bytes) -> bool:
        """Any other method with one message each way; whether it ended well."""
        try:
            self._channel.unary_unary(SERVICE + method)(request, timeout=30)
        except grpc.RpcError:
            return False
        return True

    def call_once(self, method: str, request: Any) -> bytes:
        """Any other method of one message."""
        return self._channel.unary_unary(SERVICE + method)(request.SerializeToString(), timeout=30)

    def close(self) -> None:
        """End the session."""
        self._outgoing.put(None)
        self._channel.close()


class AnyMessage:
    """Messages with random contents, more often meaningful than not; the same for the same seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        oneof = messages.IfrtRequest.DESCRIPTOR.oneofs_by_name["request"]
        self._kinds = [field.name for field in oneof.fields if field.name != "init_request"]

    def request(self) -> tuple[str, Any]:
        """A kind of request and its body."""
        kind = self.random.choice(self._kinds)
        body = type(getattr(messages.IfrtRequest(), kind))()
        self._fill(body, 0)
        return kind, body

    def _fill(self, message: Any, depth: int) -> None:
        choose = self.random.choice
        name = message.DESCRIPTOR.full_name
        if name == "xla.ifrt.Serialized" and self.random.random() < 0.8:
            message.type_name, message.data = self._blob()
        elif name == "xla.ifrt.DTypeProto":
            message.kind = choose([1, F32, F32, 12, 16, 99, 14, 0, 21])
        elif name == "xla.ifrt.ShapeProto":
            message.dims.extend(choose([0, 1, 2, 4, 4, 8, -1, 1 << 20]) for _ in range(self.random.randrange(4)))
        else:
            for field in message.DESCRIPTOR.fields:
                if field.name != "version_number" and depth < 7 and self.random.random() < 0.85:
                    self._set(message, field, depth)

    def _set(self, message: Any, field: Any, depth: int) -> None:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            return
        if field.is_repeated:
            values = [self._value(field, depth) for _ in range(self.random.choice([0, 1, 1, 2, 3]))]
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self._value(field, depth))
        else:
            try:
                setattr(message, field.name, self._value(field, depth))
            except ValueError:
                pass  # does not fit the field

    def _value(self, field: Any, depth: int) -> Any:
        choose, kind = self.random.choice, field.type
        if kind == FieldDescriptor.TYPE_MESSAGE:
            message = messages.message_class(field.message_type.full_name)()
            self._fill(message, depth + 1)
            return message
        if kind == FieldDescriptor.TYPE_ENUM:
            return choose([value.number for value in field.enum_type.values])
        if kind == FieldDescriptor.TYPE_BOOL:
            return choose([False, True])
        if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return choose([0.0, -1.0, float("nan")])
        if kind == FieldDescriptor.TYPE_STRING:
            return choose(["", "device", "pinned_host", "nowhere"])
        if kind == FieldDescriptor.TYPE_BYTES:
            return choose([b"", b"\0", self.random.randbytes(20)])
        value = choose(_INTEGERS)
        return -value if kind in _SIGNED and self.random.random() < 0.2 else value

    def _blob(self) -> tuple[str, bytes]:
        choose, dice = self.random.choice, self.random.random()
        if dice < 0.5:
            proto = messages.SingleDeviceShardingProto(device_id=choose([0, 0, 1, 2, 3, 99, -1]))
            return shardings.SINGLE_DEVICE, proto.SerializeToString()
        if dice < 0.8:
            count = choose([0, 1, 2, 4])
            proto = messages.HloShardingProto()
            proto.devices.device_ids.extend(choose([list(range(count)), [0] * count, [7] * count]))
            proto.xla_op_sharding.type = choose([0, 1, 2, 3, 4])
            proto.xla_op_sharding.tile_assignment_dimensions.extend(choose([[count], [count, 1], [0], [2, 2]]))
            return shardings.HLO, proto.SerializeToString()
        names = (
            "xla::ifrt::XlaProgram", "xla::ifrt::PluginProgram", shardings.OPAQUE, shardings.CONCRETE,
            shardings.CONCRETE_EVEN, "", "?",
        )  # fmt: skip
        return choose(names), self.random.randbytes(self.random.randrange(30))
