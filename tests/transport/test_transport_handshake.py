"""Who may connect: both ends prove the secret, on real sockets, against peers that lie, stop or dawdle."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sockets import HOST, PATIENCE_SECONDS, Background, listener, with_stream_server

from ridgeway.transport import authentication, blocking_link, stream_link
from ridgeway.transport.authentication import AuthenticationError

Serve = Callable[[socket.socket], None]
"""What a false head does with a connection."""


def connect_blocking(port: int, secret: str, timeout_seconds: float) -> None:
    blocking_link.connect(HOST, port, secret, timeout_seconds).close()


def connect_stream(port: int, secret: str, timeout_seconds: float) -> None:
    async def connect() -> None:
        (await stream_link.open_link(HOST, port, secret, timeout_seconds)).close()

    asyncio.run(connect())


def accept_blocking(client: Callable[[int], Any], secret: str, timeout_seconds: float) -> None:
    """Accept one connection of ``client``, which runs beside; raises what accepting raised."""
    with listener() as server:
        beside = Background(lambda: client(server.getsockname()[1]))
        try:
            blocking_link.accept(server.accept()[0], secret, timeout_seconds).close()
        finally:
            beside.result()


def accept_stream(client: Callable[[int], Any], secret: str, timeout_seconds: float) -> None:
    async def test(port: int, link: "asyncio.Future[stream_link.StreamLink]") -> None:
        client_done = asyncio.get_running_loop().run_in_executor(None, client, port)
        try:
            await link
        finally:
            await client_done

    with_stream_server(test, secret, timeout_seconds)


CONNECTORS = pytest.mark.parametrize("connect", [connect_blocking, connect_stream])
ACCEPTORS = pytest.mark.parametrize("accept", [accept_blocking, accept_stream])


def against(serve: Serve, connect: Callable[..., None], timeout_seconds: float = 5.0) -> None:
    """Connect to a false head; raises what connecting raised."""
    with listener() as server:

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE_SECONDS)
                serve(connection)

        beside = Background(run)
        try:
            connect(server.getsockname()[1], "s", timeout_seconds)
        finally:
            beside.result()


def read(connection: socket.socket, count: int) -> bytes:
    return bytes(blocking_link.read_exactly(connection, count))


def until_closed(connection: socket.socket) -> None:
    """Wait for the other end to hang up."""
    try:
        while connection.recv(1024):
            pass
    except ConnectionError:
        pass


# ---- secrets


@CONNECTORS
@ACCEPTORS
def test_ends_with_the_same_secret_accept_each_other(connect: Callable[..., None], accept: Callable[..., None]) -> None:
    accept(lambda port: connect(port, "the secret", 5.0), "the secret", 5.0)


@CONNECTORS
@ACCEPTORS
def test_a_client_with_another_secret_is_refused_and_told(
    connect: Callable[..., None], accept: Callable[..., None]
) -> None:
    def client(port: int) -> None:
        with pytest.raises(AuthenticationError, match="has another cluster secret"):
            connect(port, "another", 5.0)

    with pytest.raises(AuthenticationError, match="wrong cluster secret"):
        accept(client, "the secret", 5.0)


@CONNECTORS
def test_a_head_that_accepts_everybody_without_knowing_the_secret_is_refused(connect: Callable[..., None]) -> None:
    def impostor(connection: socket.socket) -> None:
        connection.sendall(authentication.MAGIC + authentication.new_nonce())
        read(connection, authentication.NONCE_BYTES + authentication.PROOF_BYTES)
        connection.sendall(authentication.ACCEPTED + bytes(authentication.PROOF_BYTES))
        until_closed(connection)

    with pytest.raises(AuthenticationError, match="does not know the cluster secret"):
        against(impostor, connect)


@CONNECTORS
def test_a_head_that_reflects_the_clients_own_proof_is_refused(connect: Callable[..., None]) -> None:
    def reflector(connection: socket.socket) -> None:
        connection.sendall(authentication.MAGIC + authentication.new_nonce())
        answer = read(connection, authentication.NONCE_BYTES + authentication.PROOF_BYTES)
        connection.sendall(authentication.ACCEPTED + answer[authentication.NONCE_BYTES :])
        until_closed(connection)

    with pytest.raises(AuthenticationError, match="does not know the cluster secret"):
        against(reflector, connect)


@ACCEPTORS
def test_a_proof_of_another_conversation_is_refused(accept: Callable[..., None]) -> None:
    old = authentication.new_nonce()

    def replayer(port: int) -> None:
        with socket.create_connection((HOST, port), PATIENCE_SECONDS) as connection:
            read(connection, authentication.GREETING_BYTES)
            nonce = authentication.new_nonce()
            connection.sendall(nonce + authentication.proof("s", b"client", old, nonce))
            assert read(connection, 1) == authentication.REFUSED
            until_closed(connection)

    with pytest.raises(AuthenticationError, match="wrong cluster secret"):
        accept(replayer, "s", 5.0)


def test_the_secret_itself_never_travels() -> None:
    seen: list[bytes] = []

    def tap(connection: socket.socket) -> None:
        connection.sendall(authentication.MAGIC + authentication.new_nonce())
        seen.append(read(connection, authentication.NONCE_BYTES + authentication.PROOF_BYTES))

    with pytest.raises(AuthenticationError):
        against(tap, connect_blocking)
    assert b"s" * 8 not in seen[0]
    assert len(seen[0]) == authentication.NONCE_BYTES + authentication.PROOF_BYTES


def test_secrets_and_nonces_are_fresh() -> None:
    assert len({authentication.new_secret() for _ in range(50)}) == 50
    assert len({authentication.new_nonce() for _ in range(50)}) == 50


# ---- those who are no Ridgeway process


@CONNECTORS
@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 100, b"SSH-2.0-x\r\n" + bytes(60)])
def test_a_server_that_is_no_head_is_named_as_such(connect: Callable[..., None], greeting: bytes) -> None:
    def other(connection: socket.socket) -> None:
        connection.sendall(greeting)
        until_closed(connection)

    with pytest.raises(AuthenticationError, match="not a Ridgeway head"):
        against(other, connect)


@CONNECTORS
@pytest.mark.parametrize("length", [0, 1, authentication.GREETING_BYTES - 1, authentication.GREETING_BYTES])
def test_a_head_that_hangs_up_in_its_greeting_is_an_error(connect: Callable[..., None], length: int) -> None:
    greeting = (authentication.MAGIC + authentication.new_nonce())[:length]

    def quitter(connection: socket.socket) -> None:
        connection.sendall(greeting)

    with pytest.raises((AuthenticationError, ConnectionError)):
        against(quitter, connect)


@CONNECTORS
def test_a_head_that_says_nothing_is_given_up_in_time(connect: Callable[..., None]) -> None:
    with pytest.raises((AuthenticationError, TimeoutError)):
        against(until_closed, connect, timeout_seconds=0.3)


@CONNECTORS
def test_a_head_that_dribbles_its_greeting_is_given_up_in_time(connect: Callable[..., None]) -> None:
    def dribbler(connection: socket.socket) -> None:
        _dribble(connection, authentication.MAGIC + authentication.new_nonce())

    with pytest.raises((AuthenticationError, TimeoutError)):
        against(dribbler, connect, timeout_seconds=0.5)


def test_nobody_at_the_address_is_an_error_of_the_system() -> None:
    with listener() as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError):
        connect_blocking(port, "s", 2.0)
    with pytest.raises(OSError):
        connect_stream(port, "s", 2.0)


@ACCEPTORS
@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(63)])
def test_a_client_that_hangs_up_in_the_handshake_is_refused(accept: Callable[..., None], data: bytes) -> None:
    def client(port: int) -> None:
        with socket.create_connection((HOST, port), PATIENCE_SECONDS) as connection:
            connection.sendall(data)

    with pytest.raises(AuthenticationError, match="handshake not finished"):
        accept(client, "s", 5.0)


@ACCEPTORS
def test_a_client_that_sends_garbage_is_refused(accept: Callable[..., None]) -> None:
    def client(port: int) -> None:
        with socket.create_connection((HOST, port), PATIENCE_SECONDS) as connection:
            connection.sendall(bytes(range(64)) * 50)
            until_closed(connection)

    with pytest.raises(AuthenticationError, match="wrong cluster secret"):
        accept(client, "s", 5.0)


@ACCEPTORS
def test_a_client_that_says_nothing_is_given_up_in_time(accept: Callable[..., None]) -> None:
    def client(port: int) -> None:
        with socket.create_connection((HOST, port), PATIENCE_SECONDS) as connection:
            until_closed(connection)

    with pytest.raises(AuthenticationError, match="handshake not finished"):
        accept(client, "s", 0.3)


@ACCEPTORS
def test_a_client_that_dribbles_its_answer_is_given_up_in_time(accept: Callable[..., None]) -> None:
    def client(port: int) -> None:
        with socket.create_connection((HOST, port), PATIENCE_SECONDS) as connection:
            read(connection, authentication.GREETING_BYTES)
            _dribble(connection, bytes(64))

    with pytest.raises(AuthenticationError, match="handshake not finished"):
        accept(client, "s", 0.5)


def _dribble(connection: socket.socket, data: bytes) -> None:
    """A byte every now and then: each alone comes in time, all of them together never would."""
    pause = threading.Event()
    try:
        for value in data:
            connection.sendall(bytes([value]))
            pause.wait(0.2)
    except OSError:
        return
    raise AssertionError("all of it was read")
