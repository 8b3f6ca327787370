"""What one rank knows to be wished: from any answer, until it is voted."""

from __future__ import annotations

from coherent_ray.train.wishes import WISH_LEAVE, WISH_SAVE, WISH_STOP, Wish, Wishes


def test_nothing_is_wished_at_first() -> None:
    wishes = Wishes()
    wishes.hear({"wish": "none", "token": 7})
    assert wishes.now() == Wish(0, 0)


def test_a_wish_to_save_stands_until_it_is_voted_by_whomever() -> None:
    wishes = Wishes()
    wishes.hear({"wish": "save", "token": 7})
    assert wishes.now() == wishes.now() == Wish(WISH_SAVE, 7)
    wishes.settle((0, 7))
    assert wishes.now() == Wish(0, 0)
    wishes.hear({"wish": "save", "token": 8})
    assert wishes.now() == Wish(WISH_SAVE, 8)


def test_what_was_voted_before_it_is_heard_makes_no_second_generation() -> None:
    """A rank that another one was faster than hears of the wish an update later."""
    wishes = Wishes()
    wishes.settle((7, 0))
    wishes.hear({"wish": "save", "token": 7})
    assert wishes.now() == Wish(0, 0)
    assert wishes.settled == [7]


def test_wishes_to_end_stay_and_save_as_well() -> None:
    for word, bit in (("stop", WISH_STOP), ("leave", WISH_LEAVE)):
        wishes = Wishes()
        wishes.hear({"wish": word, "token": 0})
        wishes.settle((7,))
        wishes.hear({"wish": "none", "token": 0})
        assert wishes.now() == Wish(bit | WISH_SAVE, 0)


def test_a_signal_is_a_wish_to_leave() -> None:
    wishes = Wishes()
    wishes.leave()
    assert wishes.now() == Wish(WISH_LEAVE | WISH_SAVE, 0)
