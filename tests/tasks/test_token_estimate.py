"""The estimate against sums worked out by hand, and its bounds on texts whose token counts under o200k_base are known."""

import pytest

from tasks.token_estimate import estimate_tokens

# text -> tokens of o200k_base
KNOWN = {
    "The committee met on Tuesday and agreed on nothing. It will meet again when the weather is better.\n" * 10: 200,
    "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))\n" * 10: 200,
}


def test_by_hand():
    assert estimate_tokens("") == 0 and estimate_tokens(" ") == 1
    # three words of 3 + 4 + 5 letters, two blanks, one full stop
    assert estimate_tokens("the lazy horse." * 100) == round(300 * 0.84 + 1200 * 0.06 + 100 * 0.68 + 100 * 0.04)
    # one run of four digits, one line break
    assert estimate_tokens("1234\n" * 100) == round(100 * 1.16 + 400 * 0.65 + 100 * 1.39)
    assert estimate_tokens("\u4eca\u5929\u5929\u6c14" * 50) == round(200 * 0.69)  # characters of three bytes
    assert estimate_tokens("\u043c\u0438\u0440" * 100) == round(300 * 0.29)  # of two


@pytest.mark.parametrize("text", KNOWN)
def test_close_to_a_real_tokenizer(text):
    assert abs(estimate_tokens(text) / KNOWN[text] - 1) < 0.2


def test_text_that_is_no_valid_unicode():
    assert estimate_tokens("a\ud800b") > 0
