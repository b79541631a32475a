"""After a refusal nothing is started before it is known that all refused, or that the generation has ended."""

import threading

from ridgeway.worker.agreement import Agreement

LONG_SECONDS = 60.0


def never() -> bool:
    return False


def test_nothing_is_waited_for_without_a_refusal() -> None:
    agreement = Agreement()
    assert agreement.reached(never, LONG_SECONDS)
    agreement.everybody_refused(3)
    assert agreement.reached(never, LONG_SECONDS)


def test_a_refusal_is_settled_when_everybody_refused() -> None:
    agreement = Agreement()
    agreement.refused(3)
    assert not agreement.reached(never, 0.02)
    teller = threading.Timer(0.05, agreement.everybody_refused, (3,))
    teller.start()
    assert agreement.reached(never, LONG_SECONDS)
    teller.join()
    # Once settled, it is over.
    assert agreement.reached(never, 0.0)


def test_what_is_said_of_another_execution_settles_nothing() -> None:
    agreement = Agreement()
    agreement.refused(3)
    agreement.everybody_refused(2)
    assert not agreement.reached(never, 0.02)


def test_what_was_said_of_an_earlier_refusal_does_not_settle_the_next() -> None:
    agreement = Agreement()
    agreement.refused(3)
    agreement.everybody_refused(3)
    agreement.refused(4)
    agreement.everybody_refused(3)
    assert not agreement.reached(never, 0.02)
    agreement.everybody_refused(4)
    assert agreement.reached(never, LONG_SECONDS)


def test_the_end_of_the_generation_ends_the_waiting() -> None:
    agreement = Agreement()
    agreement.refused(3)
    ended = threading.Event()
    threading.Timer(0.05, ended.set).start()
    assert agreement.reached(ended.is_set, LONG_SECONDS)


def test_what_failed_while_it_ran_is_settled_like_a_refusal() -> None:
    agreement = Agreement()
    agreement.failed(3, spans=False)
    assert agreement.doubtful
    assert agreement.reached(never, 0.0)
    agreement.failed(4, spans=True)
    assert not agreement.reached(never, 0.02)
    agreement.everybody_refused(4)
    assert agreement.reached(never, LONG_SECONDS)
