"""Judging of math answers."""

from __future__ import annotations

import threading
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_apps.tools.math_answer import extract_answer, is_correct
from serve_apps.tools.math_strings import is_same_string

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{3} and then \\boxed{\\frac{1}{2}} hold", "\\frac{1}{2}"),
        ("\\boxed{2}, so \\boxed{3} and \\boxed{5}.", "3, 5"),
        ("\\boxed{3}\\boxed{4}\\boxed{5}", "5"),
        ("x = \\boxed{3} and y = \\boxed{5}", "3, 5"),
        ("x = \\boxed{3} and so y = \\boxed{5}", "5"),
        ("\\boxed{5} and an open \\boxed{6", "5"),
        ("\\boxed{a \\fbox{b}} } c", "b"),
        ("\\boxed{\\{2,1\\}} {", "\\{2,1\\}"),
        ("</ANSWER><ANSWER>4<ANSWER>5</ANSWER> 6</ANSWER>", "4<ANSWER>5"),
        ("<ANSWER>4</ANSWER> <FINAL_ANSWER> 55 </FINAL_ANSWER>", "55"),
        ("First answer: 3\nThe final answer is: 12", "12"),
        ("  17 ", "17"),
        ("", ""),
    ],
)
def test_the_last_stated_answer_is_extracted(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


COLUMN = r"\begin{pmatrix} 4 \\ 5 \end{pmatrix}"
SQUARE = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"

RIGHT = {
    "plain numbers": [
        ("55", "55"),
        ("055", "55"),
        ("55.0", "55"),
        ("1,234", "1234"),
        (r"1{,}234", "1234"),
        ("−41", "-41"),
        ("$55$.", "55"),
        ("7+6*8=55", "55"),
        ("x = 55", "55"),
        ("0.5", r"\frac{1}{2}"),
        ("-3/6", "-0.5"),
    ],
    "formulas": [
        ("90^\\circ", "90"),
        ("1.5\\times10^3", "1500"),
        (r"50\%", "50"),
        ("\\boxed{x^2+2x+1}", "(x+1)^2"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("\\{2,1\\}", "\\{1,2\\}"),
        (r"x \in [1,2]", "[1,2]"),
        (r"\text{East}", "East"),
        (r"\\frac{1}{2}", "0.5"),
    ],
    "rows": [
        (rf"\boxed{{{COLUMN}}}", COLUMN),
        (r"\begin{pmatrix} 4\\ 5 \end{pmatrix}.", COLUMN),
        (r"\begin{pmatrix} 4.0 \\ 10/2.0 \end{pmatrix}".replace("10/2.0", "5.0"), COLUMN),
        (r"\begin{pmatrix} 4 \\ 5 \\ \end{pmatrix}", COLUMN),
        (r"\left(\begin{array}{c} 4 \\ 5 \end{array}\right)", COLUMN),
        (r"\left[\begin{matrix} 4 \\ 5 \end{matrix}\right]", COLUMN),
        (r"\mathbf{v} = \begin{pmatrix} 4 \\ 5 \end{pmatrix}", COLUMN),
        ("The answer is $\\begin{pmatrix}\n4 \\\\\n5\n\\end{pmatrix}$.", COLUMN),
        (r"\begin{bmatrix} 1/2 \\ \sqrt{8} \end{bmatrix}", r"\begin{pmatrix} \frac12 \\ 2\sqrt2 \end{pmatrix}"),
        (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", SQUARE),
        (r"2\begin{pmatrix} 2 \\ 5 \end{pmatrix}", r"\begin{pmatrix} 4 \\ 10 \end{pmatrix}"),
        (
            r"\begin{pmatrix} 2 \\ 5 \end{pmatrix} + t \begin{pmatrix} 1 \\ 3 \end{pmatrix}",
            r"\begin{pmatrix} 2\\5 \end{pmatrix}+t\begin{pmatrix}1\\3\end{pmatrix}",
        ),
        (r"\begin{cases} x = 1 \\ y = 2 \end{cases}", r"\begin{cases}x=1\\y=2\end{cases}"),
        (r"\left\{\begin{array}{l} x = 1 \\ y = 2 \end{array}\right.", r"\begin{cases}x=1\\y=2\end{cases}"),
    ],
    "thoughts": [
        (r"<think>I try \boxed{41}</think>The answer is 40", "40"),
        (r"I try \boxed{41}</think>\boxed{40}", "40"),
        ("<think>a</think>b<think>41</think>40", "40"),
        ("<think></think>\n\n40", "40"),
    ],
    "shorthand fractions": [
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}"),
        (r"\tfrac12", "1/2"),
        (r"\frac 1 2", "0.5"),
        (r"\frac1{2}", "0.5"),
        (r"-\frac{1}2", "-0.5"),
        (r"\frac{-1}{2}", "-0.5"),
        (r"1\frac{1}{2}", "1.5"),
        (r"\frac\pi2", r"\pi/2"),
        (r"\frac{\pi}2", r"\frac{\pi}{2}"),
    ],
    "Markdown": [
        ("The answer is *41*", "41"),
        ("**Answer**: 41", "41"),
        ("**The answer is 41.**", "41"),
        ("The answer is:\n\n**41**", "41"),
        ("The answer is:\n\\[\n41\n\\]", "41"),
        ("`41`", "41"),
        ("__41__", "41"),
        ("### 41", "41"),
        ("**41** km/h", "41"),
        ("The answer is **41** apples.", "41"),
        ("**Answer:** **41** km/h", "41"),
        ("The answer is _41_ km/h.", "41"),
        ("The answer is: **41**!", "41"),
        ("The answer is $41$!", "41"),
        ("So it is 40 + 1.\n\n**Final Answer**\n\n41", "41"),
    ],
    "closing phrases": [
        (r"Final Answer: The final answer is $\frac{3}{7}$. I hope it is correct.", r"\frac{3}{7}"),
        ("The answer is 41. Let me know if you have questions.", "41"),
        ("41. I hope this helps!", "41"),
        ("The answer is 41. Please let me know if you need more.", "41"),
        ("The answer is 41. If you have any questions, please feel free to ask.", "41"),
        ("The answer is 41\n\nThis completes the proof.", "41"),
    ],
    "units": [
        (r"\boxed{41\text{ km/h}}", "41"),
        (r"41\text{ apples}", "41"),
        (r"41\ \text{miles per hour}", "41"),
        (r"9.8\,\mathrm{m/s}^2", "9.8"),
        (r"9.8\text{ m}/\text{s}^2", "9.8"),
        (r"\frac12\text{ km/h}", "0.5"),
        (r"1.5\text{ N}\cdot\text{m}", "1.5"),
        ("55 apples", "55"),
        ("18 dollars", "18"),
        ("18 people", "18"),
        ("The answer is 18 eggs.", "18"),
        ("41 km/h", "41"),
        ("9.8 m/s^2", "9.8"),
        ("41 words per minute", "41"),
        ("3 kg*m^2/s^2", "3"),
        (r"41~\text{km/h}", "41"),
        ("41 m²", "41"),
        ("41 m³/s", "41"),
        (r"41\ \mathrm{km\,h^{-1}}", "41"),
        (r"3\,\mathrm{kg\cdot m^2\,s^{-2}}", "3"),
        ("41 meters squared", "41"),
        ("41 square meters per second", "41"),
    ],
    "words": [("no  Solution", "No solution"), (r"\text{AB}", "AB"), ("A B C", "ABC"), ("yx", "xy")],
    "equations": [("x = 5", "5"), ("x = 10/2, x = 5", "5"), ("x >= 5", "x >= 5")],
    "bases": [("52_8", "52_8"), ("52", "52_8"), ("101_{2}", "101_2")],
    "words that multiply": [
        (r"\boxed{41\text{ million}}", "41000000"),
        ("2.5 million", "2500000"),
        ("41 thousand dollars per year", "41000"),
        ("3 dozen eggs", "36"),
        ("41000000", r"41\text{ million}"),
        ("41 million people", "41 million"),
    ],
    "several boxes": [
        (r"\boxed{3} and \boxed{5}", "3, 5"),
        (r"$\boxed{3}$, $\boxed{5}$", "5, 3"),
        (r"$x_1 = \boxed{3}$ or $x_2 = \boxed{5}$", "3, 5"),
        (r"\boxed{x = 3}\text{ or }\boxed{x = 5}", "x = 3 or x = 5"),
        (r"\boxed{5}, \boxed{5}", "5"),
        (r"\boxed{3} is not it: \boxed{5}", "5"),
    ],
    "typed signs": [
        ("–5", "-5"),
        ("－5", "-5"),
        ("5", "５。"),
        ("The answer is：5", "5"),
        ("€5", "5"),
        ("£5.00", "5"),
        ("1,200 ₹", "1200"),
        ("€5 million", "5000000"),
        ("10\u202f000", "10000"),
        ("1 1/2", "1.5"),
        ("The answer is −1 1/2.", "-1.5"),
        ("1 1/2 cups", r"\frac{3}{2}"),
        ("½", "0.5"),
        ("2¾", "2.75"),
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("(1+√5)/2", r"\frac{1+\sqrt5}{2}"),
        ("∛2", r"\sqrt[3]{2}"),
        ("2*pi/3", r"\frac{2\pi}{3}"),
        ("x² − 4", "x^2-4"),
        ("x⁻¹", "x^{-1}"),
        ("e⁻ˣ", "e^{-x}"),
        ("1.5×10⁻³", "0.0015"),
        ("3 x 10^4", "30000"),
        ("52₈", "52_8"),
        ("45°", r"45^\circ"),
        ("3∶4", "3:4"),
        ("(−∞, −2) ∪ (2, ∞)", r"(-\infty,-2)\cup(2,\infty)"),
        ("±√2", r"\pm\sqrt{2}"),
        ("x ∈ ℝ", r"x \in \mathbb{R}"),
        ("3·4x", "12x"),
        ("41 m·s⁻¹", "41"),
    ],
    "GSM8K's own form": [
        ("He pays 6 * 3 = 18.\n#### 18", "18"),
        ("First 3, then 4.\n#### $1,234", "1234"),
        ("#### 18", "She makes 9 * 2 = 18.\n#### 18"),
    ],
    "degrees and texts": [(r"45\degree", "45"), (r"45^\degree", r"45^\circ"), (r"\text{June 20}", "June 20")],
    "times of day": [("10:30 pm", r"10:30\text{ p.m.}"), ("10:30", r"10:30\text{ a.m.}")],
    "numbers as programs print them": [
        ("1e-3", "0.001"),
        ("1.5e3", "1500"),
        ("1E+5", "100000"),
        ("-1e-03", "-0.001"),
        ("np.float64(0.5)", "1/2"),
        ("Fraction(1, 2)", "0.5"),
        ("Decimal('0.5')", "0.5"),
        ("1.5e3, 2", "1500, 2"),
        ("(1e-3, -2)", "(0.001, -2)"),
        ("np.float64(1.5), Fraction(1, 2)", "1.5, 0.5"),
    ],
}
WRONG = {
    "nothing": [("", "55"), ("   ", "55")],
    "other numbers": [
        ("54", "55"),
        ("12 or 55", "55"),
        ("12, 55", "55"),
        ("5 5", "55"),
        ("1e3", "1000.1"),
        ("1e999999999", "1"),
        ("x+2", "x+1"),
    ],
    "not evaluated": [
        ("7+6*8", "55"),
        ("14/2", "7"),
        (r"\frac{14}{2}", "7"),
        (r"6\frac{2}{2}", "7"),
        ("\\sqrt{49}", "7"),
        ("7^2", "49"),
        ("2**3", "8"),
    ],
    "rows": [
        (r"\boxed{\begin{pmatrix} 4 \\ 9 \end{pmatrix}}", COLUMN),
        (r"\begin{pmatrix} 5 \\ 4 \end{pmatrix}", COLUMN),
        (r"\begin{pmatrix} 4 \end{pmatrix}", COLUMN),
        (r"\begin{pmatrix} 4 \\ 5 \\ 0 \end{pmatrix}", COLUMN),
        (r"\begin{pmatrix} 4 \\ \end{pmatrix}", COLUMN),
        (r"\begin{pmatrix} 4 \\ 5", COLUMN),
        ("4", COLUMN),
        (r"4 \\ 9", r"4 \\ 5"),
        (r"\left[\begin{matrix} 4 \\ 9 \end{matrix}\right]", COLUMN),
        (r"\left(\begin{array}{c} 4 \\ 9 \end{array}\right)", COLUMN),
        (r"2\begin{pmatrix} 2 \\ 4 \end{pmatrix}", COLUMN),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", SQUARE),
        (r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}", SQUARE),
        (r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", SQUARE),
        (
            r"\begin{pmatrix} 2 \\ 5 \end{pmatrix} + t \begin{pmatrix} 1 \\ 4 \end{pmatrix}",
            r"\begin{pmatrix} 2 \\ 5 \end{pmatrix} + t \begin{pmatrix} 1 \\ 3 \end{pmatrix}",
        ),
        (r"\begin{cases} x = 1 \\ y = 3 \end{cases}", r"\begin{cases} x = 1 \\ y = 2 \end{cases}"),
    ],
    "thoughts": [
        (r"<think>I try \boxed{41}</think>The answer is 40", "41"),
        (r"<think>I try \boxed{41}", "41"),
        ("41<think>", "41"),
        ("<think>40</think>Well, <think>41", "41"),
    ],
    "units that are none": [
        (r"41\text{ or }42", "41"),
        (r"41\text{ x }42\text{ y}", "41"),
        ("41 x/y", "41"),
        ("41x", "41"),
        ("41 sin/cos", "41"),
        ("41 - abc", "41"),
        ("41 * abc/def", "41"),
        ("41/abc", "41"),
    ],
    "words that make another number": [
        (r"\boxed{41\text{ million}}", "41"),
        ("41 million", "41"),
        ("41 thousand per year", "41"),
        (r"41\text{ Thousand dollars}", "41"),
        (r"41\text{ dozen}", "41"),
        (r"41\text{ tenths}", "41"),
        ("41 million or more", "41000000"),
        (r"5\text{ cubed}", "5"),
        (r"5\text{ factorial}", "5"),
        ("5 half", "5"),
        ("5 modulo", "5"),
        ("5 tenth", "5"),
        ("41", r"41\text{ million}"),
    ],
    "letters in another order": [
        ("BCA", "ABC"),
        ("B C A", "A B C"),
        ("Amy", "May"),
        ("on solution", "no solution"),
        (r"\text{BA}", r"\text{AB}"),
    ],
    "other relations": [("x >= 5", "5"), ("x != 5", "5"), (r"x \not= 5", "5"), ("2+3 >= 5", "5")],
    "two values": [("x=-5 or x=5", "5"), ("x = -5, x = 5", "5")],
    "several boxes": [
        (r"\boxed{3} and \boxed{5}", "3"),
        (r"\boxed{3} and \boxed{5}", "5"),
        (r"\boxed{3} and \boxed{5}", "3, 6"),
        (r"\boxed{3} and \boxed{5}", "3, 4, 5"),
        (r"\boxed{3}, \boxed{4}, \boxed{5}", "5"),
        (r"\boxed{3}\boxed{4}\boxed{5}", "3"),
        (r"\boxed{x} or \boxed{y}", "y"),
        (r"\boxed{\pi} or \boxed{2\pi}", r"2\pi"),
        (r"\boxed{A}, \boxed{B}", "B"),
        (r"\boxed{1},\boxed{234}", "1234"),
    ],
    "typed signs": [
        ("5–", "-5"),
        ("—5", "-5"),
        ("3–5", "-2"),
        ("3–5", "8"),
        ("5 – 3", "2"),
        ("2010–2014", "-2014"),
        ("2010–2014", "-4"),
        ("1 1/2", "11/2"),
        ("1 1/2", "1/2"),
        ("1 1/2", "2"),
        ("1 3/2", "2.5"),
        ("1/2", "1 1/2"),
        ("1½", "11/2"),
        ("½", "2"),
        ("½", "12"),
        ("√2", "2"),
        ("√4", "2"),
        ("√12", r"2\sqrt{2}"),
        ("√1 2", r"\sqrt{12}"),
        ("52₈", "528"),
        ("52₈", "42"),
        ("10²", "102"),
        ("2ˣ", "2x"),
        ("xᵢ", "xi"),
        ("x²", "x2"),
        ("10⁻³", "103"),
        ("±5", "5"),
        ("≤ 5", "5"),
        ("€5 or €6", "5"),
        ("€5–€6", "5"),
        ("5\u00a0000", "5"),
        ("1\u00a0234", "1.234"),
    ],
    "other bases": [("101_3", "101_2"), ("52_{16}", "52_8")],
    "numbers as programs print them": [("1.5e3, 2", "1500, 3"), ("1e3x, 2", "1000, 2")],
    "GSM8K's own form": [
        ("#### 1. First\nThe answer is 4.", "1"),
        ("18\n#### 19", "18"),
        ("18\n#### Check it 18", "19"),
    ],
    "times of day": [("10:30 pm", "10:30 am"), ("3 pm", "3 am"), (r"10:30\text{ p.m.}", r"10:30\text{ a.m.}")],
    "phrases that state something": [
        ("42. I hope 41", "41"),
        ("41. No, 42", "41"),
        ("East. West", "East"),
    ],
    "what is written around a part": [
        (r"x + answer \frac{1}{2}", r"\frac{x}{2}"),
        (r"answer \frac{1}{2} \pi x", r"\sqrt{1/4}"),
    ],
    "Markdown that is none": [
        ("The answer is **40** or **41**", "41"),
        ("The answer is 4!", "4"),
        ("## Answer\n40", "41"),
        ("2**3", "23"),
        ("a * b * c", "abd"),
    ],
    "garbage": [
        ("\\frac{1}{0}", "1"),
        ("\\frac{{{", "\\sqrt{2}"),
        ("\x00\udcff <SOLUTION>\\begin{", "\\sqrt{2}"),
        ("9" * 5000, "55"),
        ("1" * 900 + "x", "\\pi"),
        ("1 " + "1" * 5000 + "/" + "9" * 5001, "2"),
    ],
}


def table(kinds: dict[str, list[tuple[str, str]]]) -> list[Any]:
    """One case per answer, named for its kind."""
    return [pytest.param(*pair, id=f"{kind}-{n}") for kind, pairs in kinds.items() for n, pair in enumerate(pairs)]


@pytest.mark.parametrize(("answer", "reference"), table(RIGHT))
def test_equal_answers_are_correct(answer: str, reference: str) -> None:
    assert is_correct(answer, [reference])


@pytest.mark.parametrize(("answer", "reference"), table(WRONG))
def test_other_answers_and_garbage_are_not_correct(answer: str, reference: str) -> None:
    assert not is_correct(answer, [reference])


def test_any_reference_counts() -> None:
    assert is_correct("3", ["2", "3"])
    assert not is_correct("3", [])


@pytest.mark.nightly
def test_a_deadline_holds_off_the_main_thread_against_one_endless_c_call() -> None:
    verdicts: list[bool] = []
    worker = threading.Thread(target=lambda: verdicts.append(is_correct("9^{9^{9^{9}}}", ["x+1"])))
    worker.start()
    worker.join(60)
    assert verdicts == [False]
    assert is_correct("1+x", ["x+1"]), "the judge works again after it was killed"


MATRICES = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(-99, 99), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)
SEPARATORS = st.sampled_from(["\\\\", " \\\\ ", "\\\\\n", " \\\\[4pt] "])
ENVIRONMENTS = st.sampled_from(["pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix"])


def written(rows: list[list[int]], separator: str = r" \\ ", environment: str = "pmatrix") -> str:
    body = separator.join(" & ".join(map(str, row)) for row in rows)
    return rf"\begin{{{environment}}} {body} \end{{{environment}}}"


@given(rows=MATRICES, separator=SEPARATORS, environment=ENVIRONMENTS)
def test_a_matrix_is_right_however_it_is_written(rows: list[list[int]], separator: str, environment: str) -> None:
    assert is_correct(written(rows, separator, environment), [written(rows)])


@given(rows=MATRICES, separator=SEPARATORS, change=st.integers(-9, 9).filter(bool), data=st.data())
def test_a_matrix_with_one_other_entry_is_wrong(
    rows: list[list[int]], separator: str, change: int, data: st.DataObject
) -> None:
    other = [list(row) for row in rows]
    i, j = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
    other[i][j] += change
    assert not is_correct(written(other, separator), [written(rows)])


@given(rows=MATRICES, separator=SEPARATORS)
def test_a_matrix_of_another_shape_is_wrong(rows: list[list[int]], separator: str) -> None:
    reference = written(rows)
    assert not is_correct(written([*rows, rows[-1]], separator), [reference])
    assert not is_correct(written([[*row, row[-1]] for row in rows], separator), [reference])
    assert is_correct(written([list(column) for column in zip(*rows, strict=True)], separator), [reference]) == (
        rows == [list(column) for column in zip(*rows, strict=True)]
    )


WRAPPINGS = [
    "{}",
    "${}$",
    r"\({}\)",
    r"\boxed{{{}}}",
    "The answer is {}",
    "The answer is {}.",
    "The answer is **{}**.",
    "The answer is **{}** km/h.",
    "The answer is __{}__.",
    "## Answer\n{}",
    "**Answer:** {}",
    "**The final answer is {}**",
    "Final Answer: The final answer is ${}$. I hope it is correct.",
    "The answer is:\n\n$$\n{}\n$$\n\nLet me know if you need more.",
    "<ANSWER>{}</ANSWER>",
    r"<think>First \boxed{{7777777}}.</think>Hence \boxed{{{}}}.",
    r"7777777</think>{}",
    r"\boxed{{{}\text{{ km/h}}}}",
    r"x = {}",
]
SPELLINGS = st.one_of(
    st.integers(-(10**6), 10**6).flatmap(lambda n: st.sampled_from([(str(n), n), (f"{n:,}", n), (f"{n}.0", n)])),
    st.builds(lambda n, d: (rf"\frac{{{n}}}{{{d}}}", Fraction(n, d)), st.integers(-99, 99), st.integers(2, 99)),
    st.builds(lambda n, d: (rf"\frac{n}{d}", Fraction(n, d)), st.integers(1, 9), st.integers(2, 9)),
    st.builds(lambda n, e: (f"{n}e{e}", n * Fraction(10) ** e), st.integers(-99, 99), st.integers(-9, 9)),
).filter(lambda case: Fraction(case[1]).denominator > 1 or "frac" not in case[0])


@given(case=SPELLINGS, wrapping=st.sampled_from(WRAPPINGS))
def test_a_right_number_stays_right_in_every_wrapping_and_a_wrong_one_wrong(
    case: tuple[str, Fraction], wrapping: str
) -> None:
    spelling, value = case
    answer = wrapping.format(spelling)
    assert is_correct(answer, [str(value)])
    assert not is_correct(answer, [str(value + 1)])


@pytest.mark.parametrize(
    ("answer", "reference", "is_same"),
    [
        ("<ANSWER>4</ANSWER><FINAL_ANSWER>\\boxed{1,234}</FINAL_ANSWER>", "1234", True),
        ("The answer: 0.5", "\\frac{1}{2}", True),
        ("14/2", "7", True),
        ("\\dfrac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}2", False),
        ("\\dfrac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}{2}", True),
        ("x/2", "\\frac{X}{2}", True),
        ("90^{\\circ}", "90", True),
        ("5\\text{ cm}", "5cm", True),
        ("\\left(1, 2\\right)", "(1,2)", True),
        ("East", "\\text{east}", True),
        ("x+1", "1+x", False),
        ("2\\sqrt{3}", "\\sqrt{12}", False),
        ("\\frac{1}{0}", "1", False),
        ("1e999999999", "1", False),
        ("", "", False),
        ("9" * 5000, "9", False),
    ],
)
def test_the_string_rules_know_numbers_and_spelling_alone(answer: str, reference: str, is_same: bool) -> None:
    assert is_same_string(answer, ["zzz", reference]) is is_same


def test_one_value_in_two_spellings_is_one_answer() -> None:
    for right in (r"\boxed{\frac12} or \boxed{0.5}", r"\boxed{0.5}, \boxed{1/2}", r"\frac12, 0.5"):
        assert is_correct(right, ["0.5"])
    for wrong in (r"\boxed{\frac12} or \boxed{0.25}", r"\boxed{3}, \boxed{0.5}", r"\boxed{1}, \boxed{2}"):
        assert not is_correct(wrong, ["0.5"])
        assert not is_correct(wrong, ["12"])
