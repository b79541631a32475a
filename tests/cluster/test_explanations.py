"""Errors wait a moment for what is known of the loss that they name."""

from ridgeway.cluster.explanations import Explanations
from ridgeway.protocol import status as statuses
from ridgeway.protocol.status import Status

LOST = statuses.data_loss("slice 1 host 0 (executor 7) was lost: connection to its executor closed")
TEXT = "executor killed by signal 11 while it ran jit_step"


def test_an_error_goes_out_with_the_explanation() -> None:
    explanations, out = Explanations(0.2), []
    explanations.wait(0.0, 7, agent=1)
    explanations.when_explained(LOST, out.append)
    assert out == []
    explanations.explain(7, TEXT)
    assert out == [Status(LOST.code, f"{LOST.message} ({TEXT})")]
    explanations.when_explained(LOST, out.append)
    explanations.when_explained(out[0], out.append)
    assert out == [out[0]] * 3  # later ones too, and none twice


def test_nothing_waits_for_what_does_not_come() -> None:
    explanations, out = Explanations(0.2), []
    explanations.wait(0.0, 7, agent=1)
    explanations.when_explained(LOST, out.append)
    explanations.tick(0.1)
    assert out == []
    explanations.tick(0.2)
    assert out == [LOST]
    explanations.wait(1.0, 8, agent=1)
    other = statuses.data_loss("slice 1 host 0 (executor 8) was lost: gone")
    explanations.when_explained(other, out.append)
    explanations.agent_gone(2)
    assert out == [LOST]
    explanations.agent_gone(1)
    assert out == [LOST, other]


def test_other_errors_do_not_wait() -> None:
    explanations, out = Explanations(0.2), []
    explanations.wait(0.0, 7, agent=1)
    mistake = statuses.invalid_argument("no array 3")
    elsewhere = statuses.data_loss("slice 2 host 0 (executor 9) was lost: gone")
    explanations.when_explained(mistake, out.append)
    explanations.when_explained(elsewhere, out.append)
    assert out == [mistake, elsewhere]
