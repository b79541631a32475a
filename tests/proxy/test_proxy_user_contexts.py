"""What the client is told of its user contexts, with a model of how it takes it."""

import random
from collections import Counter

from ridgeway.proxy.user_contexts import OUTSIDE, UserContexts


class Client:
    """As jaxlib's: forgets contexts in the order of the answers' numbers."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self._waiting: dict[int, list[int]] = {}
        self._next = 0

    def asks(self, context: int) -> None:
        if context:
            self.held[context] += 1

    def hears(self, number: int, destroyed: list[int]) -> None:
        assert number not in self._waiting or number == OUTSIDE
        self._waiting[number] = destroyed
        while self._next in self._waiting:
            for context in self._waiting.pop(self._next):
                assert self.held[context] > 0  # it would end its process
                self.held[context] -= 1
            self._next += 1


def test_every_context_is_forgotten_whatever_the_order_of_answers_and_errors() -> None:
    for seed in range(200):
        chooser = random.Random(seed)
        contexts, client = UserContexts(), Client()
        outstanding: list[tuple[int, int]] = []
        answers: list[tuple[int, list[int]]] = []
        for operation in range(1, 200):
            context = chooser.choice((0, chooser.randint(1, 5)))  # several requests of one call have the same one
            contexts.asked(operation, context)
            client.asks(context)
            outstanding.append((operation, context))
            while outstanding and chooser.random() < 0.5:
                done, context = outstanding.pop(chooser.randrange(len(outstanding)))
                is_error = chooser.random() < 0.2
                number, destroyed = contexts.answered(done, not is_error)
                assert (number == OUTSIDE) == (is_error or not context)
                if not is_error:
                    answers.append((number, destroyed))
            chooser.shuffle(answers)  # it works on several at a time
            while answers and chooser.random() < 0.5:
                client.hears(*answers.pop())
        for operation, context in [*outstanding, (200, 6)]:
            if operation == 200:
                contexts.asked(operation, context)
                client.asks(context)
            answers.append(contexts.answered(operation, True))
        for answer in answers:
            client.hears(*answer)
        assert not client.held.total()


def test_nothing_is_said_in_answers_that_the_client_does_not_look_at() -> None:
    contexts = UserContexts()
    contexts.asked(1, 7)
    contexts.asked(2, 8)
    assert contexts.answered(1, False) == (OUTSIDE, [])
    assert contexts.answered(3, True) == (OUTSIDE, [])
    assert contexts.answered(2, True) == (0, [7, 8])
    contexts.asked(4, 9)
    assert contexts.answered(4, True) == (1, [9])
