"""Text that others chose: it acts on no terminal, and values are shown in bounded time."""

from __future__ import annotations

import pickle
import sys
import unicodedata

import pytest

from relive import errors
from relive.printable import HIDDEN, printable, shown


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("\x9b2J\x85\x7f\x00", r"\x9b2J\x85\x7f\x00"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\u202eabc\u2066\u2069\u200f\u061c", r"\u202eabc\u2066\u2069\u200f\u061c"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ufeff\u200b\u2060\xad\U000e0041", r"\ufeff\u200b\u2060\xad\U000e0041"),
        ("\ud800\udcff", r"\ud800\udcff"),
    ],
)
def test_what_acts_on_a_terminal_or_is_not_seen_is_shown_as_its_code(given: str, expected: str) -> None:
    assert printable(given) == expected
    assert printable(expected) == expected


@pytest.mark.parametrize("name", ["größe_42", "漢字", "γ λ α", "имя", "نام\u200cها", "👩\u200d🚀", "a\\x1b", "[red]"])
def test_letters_of_all_scripts_stay(name: str) -> None:
    assert printable(name) == name


def test_every_control_separator_and_half_character_is_hidden_and_no_letter_is() -> None:
    for number in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(number))
        if category in ("Cc", "Zl", "Zp", "Cs") or unicodedata.bidirectional(chr(number)) in (
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
        ):  # fmt: skip
            assert HIDDEN.match(chr(number)), hex(number)
        elif category[0] in "LMNPSZ":
            assert not HIDDEN.match(chr(number)), hex(number)


def test_values_that_share_their_members_are_shown_at_once() -> None:
    for kind in (lambda x: (x, x), lambda x: [x, x], lambda x: {"a": x, "b": x}):
        value: object = ()
        for _ in range(60):
            value = kind(value)
        assert len(shown(value)) <= 80
        assert shown(value).endswith("...")
    itself: list[object] = []
    itself.append(itself)
    assert len(shown(itself, 200)) <= 200


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2.5, None, True], "[1, 2.5, None, True]"),
        ({"a": (1, "b")}, "{'a': (1, 'b')}"),
        ("x" * 10**6, "'" + "x" * 76 + "..."),
        (bytearray(10**6), "bytearray(b'" + r"\x00" * 16 + r"\..."),
        (1 << 10**6, "a whole number of 1,000,001 bits"),
        (range(3), "range(0, 3)"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, ...]"),
        ("\x1b", r"'\x1b'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_shown_as_python_writes_them_up_to_a_length(value: object, text: str) -> None:
    assert shown(value) == text


def test_errors_show_names_as_codes_and_keep_what_was_said() -> None:
    error = errors.FieldError("field 'a\x1b[2J\nno mistake\ud800'")
    assert str(error) == r"field 'a\x1b[2J\nno mistake\ud800'"
    assert pickle.loads(pickle.dumps(error)).args == error.args
    assert str(errors.NoSaveError("'\x1b'")) == r"'\x1b'"
    assert str(errors.ParameterError("a plan:\n  obs\x1b")) == "a plan:\n  obs\\x1b"
    long = str(errors.FieldError("begin " + "x" * 10**6 + " end"))
    assert len(long) < 11_000
    assert long.startswith("begin")
    assert long.endswith("end")
