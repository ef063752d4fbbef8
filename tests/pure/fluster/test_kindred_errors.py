"""Exceptions as they are described and pickled for another process."""

from __future__ import annotations

import pickle

import pytest

from fluster.errors import RemoteError
from fluster.remote_errors.kindred_errors import message_of, pickled, pickled_or_kindred, type_name
from fluster_bus.core import codec

_MOST = 10_000


class NeedsTwoError(ValueError):
    """Pickled, it cannot be made again: its constructor takes other arguments than it keeps."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("not for you")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ValueError(), "ValueError"),
        (RemoteError("a", "b", "c"), "fluster.errors.RemoteError"),
        (MuteError(), "MuteError"),
    ],
)
def test_an_error_has_the_name_of_its_class_with_its_module_unless_that_is_bare(error: Exception, name: str) -> None:
    assert type_name(error, bare=("builtins", __name__)) == name


def test_an_error_whose_text_cannot_be_had_has_another() -> None:
    assert message_of(MuteError()) == "(its __str__ raised ValueError)"


def test_a_pickle_that_cannot_be_read_or_is_too_large_is_not_made() -> None:
    assert pickled(KeyError("k"), dump=codec.encode, most_bytes=_MOST) is not None
    assert pickled(NeedsTwoError("a", "b"), dump=codec.encode, most_bytes=_MOST) is None
    assert pickled(KeyError("k" * _MOST), dump=codec.encode, most_bytes=_MOST) is None
    assert pickled(KeyError("k"), dump=lambda _error: pickle.dumps(1), most_bytes=_MOST) is None


def test_a_kindred_error_is_pickled_for_one_that_cannot_be() -> None:
    text = ("NeedsTwoError", "a: b", "the traceback")
    data = pickled_or_kindred(NeedsTwoError("a", "b"), text=text, dump=codec.encode, most_bytes=_MOST)
    assert data is not None
    found = codec.decode(data)
    assert isinstance(found, RemoteError)
    assert isinstance(found, NeedsTwoError)
    assert str(found) == "a: b"
    own = pickled_or_kindred(KeyError("k"), text=text, dump=codec.encode, most_bytes=_MOST)
    assert own is not None
    assert type(codec.decode(own)) is KeyError
