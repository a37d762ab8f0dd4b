"""Texts as people and models type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.tools.plain_signs import in_plain_signs

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("O’Brien ´s", "O'Brien 's"),
        ("2010–2014, −5, ‑, －3", "2010-2014, -5, -, -3"),
        ("2010—2014: Paris—the city", "2010-2014: Paris—the city"),
        ("½, 1½, 1⁄2", "1/2, 1 1/2, 1/2"),
        ("x², 10⁻³, 3²x", "x^2, 10^{-3}, 3^{2}x"),
        ("52₈, log₂8, x₁²", "52_8, log_{2}8, x_1^2"),
        ("2ˣ, e⁻ˣ, Aᵀ, xᵢⱼ, 1ˢᵗ", "2^x, e^{-x}, A^T, x_{ij}, 1^{st}"),
        ("10\u00a0000, 1\u202f234\u2009567, 5\u00a0cm, 2010\u00a0300", "10,000, 1,234,567, 5 cm, 2010 300"),
        ("Ａ：５。", "A:5."),
        ("Cafe\u0301 so\u00adft\u200b \ufeffX™", "Café soft X"),
    ],
)
def test_typed_signs_become_plain(typed: str, plain: str) -> None:
    assert in_plain_signs(typed) == plain


@given(st.text())
def test_what_is_plain_stays(text: str) -> None:
    plain = in_plain_signs(text)
    assert in_plain_signs(plain) == plain
    if text.isascii():
        assert plain == text
