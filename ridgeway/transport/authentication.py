"""Mutual proof that both ends of a link know the cluster's secret, before anything else is read.

Challenge and response with HMAC-SHA256 over both sides' nonces (RFC 2104); the two directions use different
labels, so a proof cannot be reflected.  The secret itself never travels.
"""

import hashlib
import hmac
import secrets

MAGIC = b"RIDGEWAY-LINK-1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ACCEPTED = b"\x01"
REFUSED = b"\x00"


class AuthenticationError(ConnectionError):
    """The other end does not know this cluster's secret, or is no Ridgeway head."""


def new_secret() -> str:
    """A fresh cluster secret, 64 hexadecimal digits."""
    return secrets.token_hex(32)


def new_nonce() -> bytes:
    """``NONCE_BYTES`` random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: str, label: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What the end called ``label`` (``b"client"`` or ``b"server"``) sends to prove that it knows the secret."""
    return hmac.new(secret.encode(), label + server_nonce + client_nonce, hashlib.sha256).digest()


def is_proof(candidate: bytes, secret: str, label: bytes, server_nonce: bytes, client_nonce: bytes) -> bool:
    """Whether ``candidate`` is the proof, compared in constant time."""
    return hmac.compare_digest(candidate, proof(secret, label, server_nonce, client_nonce))


def parse_greeting(greeting: bytes) -> bytes:
    """The server's nonce.

    Raises:
      AuthenticationError: the peer is not a Ridgeway head of this version.
    """
    if not greeting.startswith(MAGIC):
        raise AuthenticationError("the other end is not a Ridgeway head (or one of another version)")
    return greeting[len(MAGIC) :]
