import math

import pytest

from paceline.observe.formats import (
    amount,
    difference,
    duration,
    figure,
    learning_rates,
    printable,
    rate,
    share,
    size,
    sizes,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [red] <b>", "plain [red] <b>"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("abc\u202etxt.exe", "abc\\u202etxt.exe"),
        ("bytes \udcff", "bytes \\udcff"),
        ("中文　ok\u00a0é", "中文　ok\u00a0é"),
        ("\x9b31m", "\\x9b31m"),
    ],
)
def test_control_characters_are_shown_and_letters_kept(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.00 s"),
        (9.999, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (86399, "1 d 00 h"),
        (math.inf, "?"),
    ],
)
def test_durations_round_without_sixty_seconds(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "0.5000"), (0.0, "0.0000"), (math.nan, "NaN"), (-math.inf, "-inf"), (1.2e-5, "1.200e-05")],
)
def test_figures(value, shown):
    assert figure(value) == shown


def test_units():
    assert (size(512), size(3 * 2**30), size(5 * 2**40)) == ("512 B", "3 GiB", "5 TiB")
    assert (size(1010 * 2**20), size(999.4 * 2**20), size(1023 * 2**30)) == ("1010 MiB", "999 MiB", "1023 GiB")
    assert (amount(812), amount(66_900_000), amount(999_600)) == ("812", "66.9 M", "1 M")
    assert (rate(98310.6), rate(3.217), rate(math.nan)) == ("98,311", "3.22", "?")
    assert share(0.1234) == "12.3%"


def test_a_unit_that_was_just_named_is_not_named_again():
    assert sizes(8.2 * 2**30, 8.1 * 2**30, 19 * 2**20, 2**30) == ["8.2 GiB", "8.1", "19 MiB", "1 GiB"]
    assert sizes() == []


def test_differences_have_a_sign_and_none_is_of_nothing():
    assert (difference(101, 100), difference(98.76, 100), difference(5, 5)) == ("+1.0%", "-1.2%", "+0.0%")
    assert difference(1, 0) == "?"


def test_equal_learning_rates_are_written_once():
    assert learning_rates((5e-5, 5e-5, 1e-3)) == "5.00e-05/1.00e-03"
    assert learning_rates((0.0,)) == "0"
    assert learning_rates((1e-5, 2e-5, 3e-5, 4e-5)) == "1.00e-05..4.00e-05"
