"""Errors that do not say their own cause."""

import dataclasses

from ridgeway.protocol.status import Status


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationFailure(Status):
    """A collective's own error, or work for a generation that was never entered.

    It stands in the place of a value until the head, which knows why the generation ended, puts that cause in its
    place; so it carries the generation with it, also when it is read much later.
    """

    generation: int = 0
