"""The dict behind plans, routes and launches: bounded, and what is in use stays."""

from threading import Thread

import pytest

from ssta.kernels.memo import Kept


def test_the_entry_that_was_used_least_recently_goes_alone():
    kept = Kept(4)
    for i in range(4):
        kept[i] = str(i)
    assert kept.get(0) == "0" and kept[2] == "2"
    kept[4] = "4"
    assert list(kept) == [3, 0, 2, 4], "1 was used least recently"
    kept[3] = "three"
    kept[5] = "5"
    assert list(kept.items()) == [(2, "2"), (4, "4"), (3, "three"), (5, "5")], "setting is a use too"


def test_one_key_too_many_does_not_lose_the_others():
    """65 kinds of inputs in turn beside one that every other call has: that one is never made again."""
    kept, made = Kept(64), 0
    for call in range(1000):
        if kept.get("often") is None:
            made, kept["often"] = made + 1, True
        if kept.get(call % 65) is None:
            kept[call % 65] = True
        assert len(kept) <= 64
    assert made == 1


def test_what_is_not_there():
    kept = Kept(2)
    assert kept.get("a") is None and kept.get("a", 3) == 3 and "a" not in kept
    with pytest.raises(KeyError):
        kept["a"]


class Key:
    """Hashing and comparing it lets other threads run in between."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number % 3)

    def __eq__(self, other):
        return self.number == other.number


def test_threads_share_one():
    kept, wrong = Kept(8), []

    def work(seed):
        try:
            for i in range(3000):
                number = (seed * 7 + i * i) % 13
                found = kept.get(Key(number))
                if found is None:
                    kept[Key(number)] = number
                elif found != number:
                    wrong.append((number, found))
        except Exception as error:
            wrong.append(error)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(kept) == 8 and all(key.number == value for key, value in kept.items())
