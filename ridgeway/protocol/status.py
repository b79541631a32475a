"""Status codes and errors as values: what the proxy answers, and how XLA's own error texts are read.

The codes are absl's; on the wire they travel in `tensorflow.StatusProto`, and the stock client raises them in
the user's process as `jax.errors.JaxRuntimeError: <CODE>: <message>`.
"""

import enum
import re
from dataclasses import dataclass
from typing import Any


class Code(enum.IntEnum):
    """The absl status codes, with their wire numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


#: Words which make `pathwaysutils.elastic.is_error_due_to_slice_down` retry: it looks for each of them, case
#: sensitively and anywhere, in the text of a JaxRuntimeError (pathwaysutils/elastic/elastic.py).
RETRIED_CODES = frozenset({Code.DATA_LOSS, Code.DEADLINE_EXCEEDED, Code.NOT_FOUND, Code.INTERNAL})


@dataclass(frozen=True, slots=True)
class Status:
    """A code with its message; an error is passed about as this value until somebody must raise it."""

    code: Code
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.code is Code.OK

    def error(self) -> "StatusError":
        """The exception that carries this status; `raise status.error()`."""
        return StatusError(self)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.message else self.code.name


class StatusError(Exception):
    """An operation failed with `status`."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status

    def __str__(self) -> str:
        return str(self.status)


OK = Status(Code.OK)


def data_loss(message: str) -> Status:
    """Data or a device is gone with its host. Elastic managers retry this one."""
    return Status(Code.DATA_LOSS, message)


def deadline_exceeded(message: str) -> Status:
    """A wait ran past its bound. Elastic managers retry this one."""
    return Status(Code.DEADLINE_EXCEEDED, message)


def not_found(message: str) -> Status:
    """Something named does not exist. Elastic managers retry this one: never use it for a user's mistake."""
    return Status(Code.NOT_FOUND, message)


def internal(message: str) -> Status:
    """Ridgeway broke its own rules. Elastic managers retry this one: never use it for a user's mistake."""
    return Status(Code.INTERNAL, message)


def invalid_argument(message: str) -> Status:
    """The request is wrong whatever the state of the cluster. Never retried."""
    return Status(Code.INVALID_ARGUMENT, without_retried_words(message))


def unimplemented(message: str) -> Status:
    """The request is understood but not supported. Never retried."""
    return Status(Code.UNIMPLEMENTED, without_retried_words(message))


def resource_exhausted(message: str) -> Status:
    """Out of memory, or of another bounded thing. Never retried."""
    return Status(Code.RESOURCE_EXHAUSTED, without_retried_words(message))


def failed_precondition(message: str) -> Status:
    """The request is wrong in the present state of the session. Never retried."""
    return Status(Code.FAILED_PRECONDITION, without_retried_words(message))


def unavailable(message: str) -> Status:
    """A service cannot be reached now."""
    return Status(Code.UNAVAILABLE, message)


_RETRIED_WORDS = re.compile("|".join(code.name for code in sorted(RETRIED_CODES)))


def without_retried_words(text: str) -> str:
    """`text` with the words of `RETRIED_CODES` lower case and spaced, so no elastic manager matches."""
    return _RETRIED_WORDS.sub(lambda match: match.group().lower().replace("_", " "), text)


def fill_status_proto(proto: Any, status: Status) -> None:
    """Write `status` into a `tensorflow.StatusProto`, which becomes present even for OK."""
    proto.SetInParent()
    proto.code = int(status.code)
    proto.message = status.message


def status_from_proto(proto: Any) -> Status:
    """Read a `tensorflow.StatusProto`; a code this release does not know becomes UNKNOWN."""
    try:
        code = Code(proto.code)
    except ValueError:
        return Status(Code.UNKNOWN, f"status code {proto.code}: {proto.message}")
    return OK if code is Code.OK and not proto.message else Status(code, proto.message)


# --- texts of XLA and jaxlib --------------------------------------------------------------------------------

_CODE_PREFIX = re.compile(
    r"\s*(?:(?:[\w.]*(?:XlaRuntimeError|JaxRuntimeError|StatusError)):\s*)?("
    + "|".join(code.name for code in Code if code is not Code.OK)
    + r")\b(?::\s*|$)"
)

# Texts of gloo, which only collectives produce, under whatever code they travel.
_GLOO_TEXT = re.compile(
    r"\bgloo [\w -]{0,60}(?:failed|timed out)|\bgloo/|\[gloo\]|\b[cg]pu:(?:gloo|nccl)", re.IGNORECASE
)

# Texts of NCCL, of XLA's rendezvous and cliques, of jax's distributed runtime, and of broken connections. The
# name of an operation alone ("all-reduce") is not among them: an out-of-memory report lists those too.
_COLLECTIVE_TEXT = re.compile(
    r"\b(?:nccl|rccl|nvshmem)\b[\w ()-]{0,60}(?:fail|error|abort|timed out|timeout)|"
    r"\brendezvous\b|"
    r"\bcliques?\b|"
    r"\bcollectives? [\w -]{0,60}(?:fail|abort|mismatch|cancel|timed out|timeout)|"
    r"\bcommunicators? [\w ]{0,60}(?:abort|invalid|fail|shut down)|"
    r"remote process exited or there was a network error|"
    r"coordination (?:service|agent)|"
    r"distributed (?:service|client|runtime)|"
    r"getkeyvalue|key[- ]value store|"
    r"\bbarrier\b[\w ]{0,60}(?:fail|error|timed out|timeout)|"
    r"missed heartbeat|heartbeat timeout|"
    r"connection (?:reset|closed|refused|aborted)|"
    r"connect (?:timeout|failure)|"
    r"broken pipe|"
    r"socket (?:closed|timeout)|"
    r"transport endpoint is not connected|"
    r"software caused connection abort|"
    r"no route to host|"
    r"caused pair closure|"
    r"\bpeer [\w ]{0,60}(?:died|lost|exited|disconnected|unhealthy)",
    re.IGNORECASE,
)

# Codes with which XLA reports what the program or its arguments did, whoever else is alive.
_PROGRAM_AT_FAULT = frozenset({Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED, Code.OUT_OF_RANGE})

# Codes that XLA gives to executions cut short by somebody else: no user mistake has them.
_CUT_SHORT = frozenset({Code.ABORTED, Code.CANCELLED, Code.UNAVAILABLE})

# A Python exception inside a user's callback: its text is the user's own and may say anything.
_CALLBACK_TEXT = re.compile(r"CpuCallback error|Traceback \(most recent call last\)")

_MEMORY_TEXT = re.compile(
    r"out of memory|ran out of (?:\w+ )?memory|failed to allocate|allocation failure|allocating \d+ bytes|"
    r"bad_alloc|memory limit exceeded|exceeds (?:the )?(?:available |device )?memory|\boom\b|"
    r"cannot allocate memory",
    re.IGNORECASE,
)

_DONATION_TEXT = re.compile(
    r"donat(?:e|ed|ion|ing)\b|"
    r"(?:buffer|array) (?:has been |was |is |already ){0,3}deleted|deleted (?:buffer|array)|"
    r"must-alias",
    re.IGNORECASE,
)

_MISSING_TARGET_TEXT = re.compile(
    r"no registered implementation|custom call (?:target|handler)|no (?:ffi )?handler registered",
    re.IGNORECASE,
)


# Some reports of XLA are hundreds of kilobytes long; what went wrong stands at their beginning or their end.
_SEARCHED_HEAD_CHARACTERS = 16_384
_SEARCHED_TAIL_CHARACTERS = 4_096


def _searched(text: str) -> str:
    """The parts of a text in which the patterns are looked for."""
    if len(text) <= _SEARCHED_HEAD_CHARACTERS + _SEARCHED_TAIL_CHARACTERS:
        return text
    return f"{text[:_SEARCHED_HEAD_CHARACTERS]}\n{text[-_SEARCHED_TAIL_CHARACTERS:]}"


def _split_code(text: str) -> tuple[Code | None, str]:
    """The code a text begins with, if any, and the rest of the text."""
    match = _CODE_PREFIX.match(text)
    if match is None:
        return None, text.strip()
    return Code[match.group(1)], text[match.end() :].strip()


def is_collective_failure(text: str) -> bool:
    """Whether the text of an XLA error says that a collective broke, so a peer is lost or was aborted.

    A survivor of a peer's death sees such an error, often before anybody sees the peer's connection close,
    under UNKNOWN ("UNKNOWN: Gloo all-reduce failed: ... Connection closed by peer"), INTERNAL, ABORTED, or
    others. Running out of memory in a collective is not one, nor is anything a user's callback raised.
    """
    text = _searched(text)
    if _CALLBACK_TEXT.search(text) or _MEMORY_TEXT.search(text):
        return False
    if _GLOO_TEXT.search(text):
        return True
    code, message = _split_code(text)
    if code in _PROGRAM_AT_FAULT:
        return False
    if _COLLECTIVE_TEXT.search(message):
        return True
    return code in _CUT_SHORT and _DONATION_TEXT.search(message) is None


def classify_runtime_error(text: str) -> Status:
    """Turn the text of an XLA or jaxlib exception into the status to answer with.

    A broken collective becomes DATA_LOSS, which elastic managers retry; a text that begins with DATA_LOSS or
    DEADLINE_EXCEEDED keeps its code. Everything else would fail again on each try, so neither its code nor
    its text contains a word that `pathwaysutils` retries: out of memory becomes RESOURCE_EXHAUSTED, misuse
    of donated or deleted arrays INVALID_ARGUMENT, a custom call nobody registered UNIMPLEMENTED, and any
    other INTERNAL or NOT_FOUND error of XLA becomes UNKNOWN with that word in lower case before its text.
    """
    code, message = _split_code(text)
    message = message or "XLA gave no further text"
    if is_collective_failure(text):
        return data_loss(f"A collective operation was broken off: {message}")
    harmless = without_retried_words(message)
    searched = _searched(message)
    if _CALLBACK_TEXT.search(searched):
        return Status(Code.UNKNOWN, harmless)
    if code is not None and code in _PROGRAM_AT_FAULT:
        return Status(code, harmless)
    if _MEMORY_TEXT.search(searched):
        return Status(Code.RESOURCE_EXHAUSTED, harmless)
    if _DONATION_TEXT.search(searched):
        return Status(Code.INVALID_ARGUMENT, harmless)
    if code is Code.DATA_LOSS or code is Code.DEADLINE_EXCEEDED:
        return Status(code, message)
    if code is Code.NOT_FOUND or code is Code.INTERNAL or code is None:
        if _MISSING_TARGET_TEXT.search(searched):
            return Status(Code.UNIMPLEMENTED, harmless)
        prefix = "" if code is None else f"{without_retried_words(code.name)} error of XLA: "
        return Status(Code.UNKNOWN, prefix + harmless)
    return Status(code, harmless)
