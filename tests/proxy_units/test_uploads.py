"""Host buffers come in a few at a time, those first that are waited for."""

from ridgeway.proxy.uploads import Uploads


class Session:
    """Uploads of one session, and what it has let in."""

    def __init__(self, window: int = 10, ahead: int = 100):
        self.here = 0
        self.want: set[int] = set()
        self.came: list[int] = []
        self.uploads = Uploads(window, ahead, self.want.__contains__, lambda: self.here)

    def ask(self, handle: int, size: int) -> int:
        return self.uploads.ask(handle, size, lambda: self.came.append(handle))


def test_as_much_as_the_window_holds_comes_at_a_time_and_in_order() -> None:
    session = Session()
    for handle in range(5):
        session.ask(handle, 4)
    assert session.came == [0, 1]
    session.uploads.ended(4)
    assert session.came == [0, 1, 2]
    assert session.uploads.waiting == 2


def test_one_that_is_larger_than_the_window_comes_alone() -> None:
    session = Session()
    session.ask(1, 1)
    session.ask(2, 50)
    session.ask(3, 1)
    assert session.came == [1]
    session.uploads.ended(1)
    assert session.came == [1, 2]
    session.uploads.ended(50)
    assert session.came == [1, 2, 3]


def test_what_a_request_waits_for_goes_first() -> None:
    session = Session()
    session.ask(1, 10)
    session.ask(2, 10)
    session.ask(3, 10)
    session.want.add(3)
    session.uploads.wanted(3)
    session.uploads.ended(10)
    assert session.came == [1, 3]


def test_what_nothing_waits_for_comes_only_while_there_is_room_for_it() -> None:
    session = Session(ahead=25)
    for handle in (1, 2, 3):
        session.ask(handle, 10)
        if handle in session.came:
            session.here += 10
            session.uploads.ended(10)
    assert session.came == [1, 2]
    # A request waits for the third: it comes, however much is here. Executors may wait for it too.
    session.want.add(3)
    session.uploads.wanted(3)
    assert session.came == [1, 2, 3]
    session.uploads.ended(10)
    session.ask(4, 10)
    assert session.came == [1, 2, 3]
    session.here = 0
    session.uploads.look()
    assert session.came == [1, 2, 3, 4]


def test_whoever_goes_away_makes_room() -> None:
    session = Session()
    first, second = session.ask(1, 10), session.ask(2, 10)
    session.ask(3, 10)
    assert session.uploads.forget(second)
    assert not session.uploads.forget(first)
    session.uploads.ended(10)
    assert session.came == [1, 3]


def test_the_end_of_the_session_lets_all_go() -> None:
    session = Session()
    numbers = [session.ask(handle, 10) for handle in (1, 2, 3)]
    session.uploads.close()
    assert session.came == [1, 2, 3]
    numbers.append(session.ask(4, 10))
    assert session.came == [1, 2, 3, 4]
    assert not any(session.uploads.forget(number) for number in numbers)
