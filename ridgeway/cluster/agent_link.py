"""The head's end of one agent."""

from collections.abc import Sequence
from typing import Any

from ridgeway.transport.stream_link import StreamLink


class AgentLink:
    """An agent that joined: its link, and what it said of itself."""

    def __init__(self, number: int, link: StreamLink, hello: dict[str, Any]):
        self.number = number
        self.link = link
        self.slot: int | None = None
        self.pid = int(hello.get("pid", 0))
        self.hostname = str(hello.get("hostname", "?"))
        self.launch_id = str(hello.get("launch_id", ""))
        self.address = str(hello.get("address", ""))

    def send(self, message: Sequence[Any]) -> None:
        """Send one message; dropped when the link is closed (its reader sees the loss)."""
        self.link.send(message)

    def close(self) -> None:
        """Close the link."""
        self.link.close()
