"""The grader reads an answer as people write it, exactly, and is never fooled or held up by a text."""

from fractions import Fraction

import pytest
from agentrl_tools.rewards.grade import grade, read_answer, read_number, read_truth
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("84", 84), ("1,234", 1234), ("1,234,567.50", Fraction(2469135, 2)), ("$1,234", 1234), ("-$5", -5), ("$-5", -5),
        ("−7", -7), ("- 7", -7), ("€3.20", Fraction(16, 5)), ("12 dollars", 12), ("12 apples.", 12), ("50%", 50),
        (r"50\%", 50), ("0.125", Fraction(1, 8)), (".5", Fraction(1, 2)), ("5.", 5), ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)), ("1 1/2", Fraction(3, 2)), ("-1 1/2", Fraction(-3, 2)), ("1½", Fraction(3, 2)),
        ("¾", Fraction(3, 4)), (r"\frac{3}{4}", Fraction(3, 4)), (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)), (r"1{,}234", 1234), (r"\$18", 18), (r"18\text{ dollars}", 18),
        ("**18**", 18), ("x = 5", 5), ("6*7 = 42", 42), ("1.5e3", 1500), ("1e3", 1000), (r"\frac12", Fraction(1, 2)),
        (r"5\frac 1 2", Fraction(11, 2)), (r"\frac{1}2", Fraction(1, 2)), (r"\frac{3{,}000}{4}", 750), ("٧٢", 72),
        ("１，２３４．５", Fraction(2469, 2)), ("١٬٢٣٤٫٥", Fraction(2469, 2)), ("7２", 72), ("５％", 5),
        (r"\boxed{\boxed{72}}", 72), (r"10\,000", 10000), (r"1,\!234", 1234), (r"\(72\)", 72), (r"90^\circ", 90),
        (r"12\text{ cm}^2", 12), ("12 m²", 12), ("72個", 72), ("minus 5", -5), ("profit -5", -5), ("No.5", 5),
        ("$5/hour", 5),
        # a space between thousands, and the scientific notation
        ("1 234", 1234), ("1 000", 1000), ("12 345 678.5", Fraction(24691357, 2)), ("-1\u00a0234", -1234),
        ("1 234/567", 1 + Fraction(234, 567)), ("1.5 x 10^3", 1500), ("1.5×10³", 1500), ("6 * 10**2 m", 600),
        (r"1.5 \times 10^{3}", 1500), (r"-2.5\cdot 10^{-2}", Fraction(-1, 40)), ("3·10⁻¹", Fraction(3, 10)),
        # words and signs that leave the number as it is
        ("5 %", 5), ("5 percent", 5), ("50% of the students", 50), ("5 km/h", 5), ("12cm", 12), ("5-day trip", 5),
        ("USD 5", 5), ("Rs.5", 5), ("5 o'clock", 5), ("5 a day", 5), ("she's got 5", 5), ("x is 5", 5), ("x: 5", 5),
        ("the answer is 5.", 5), ("answer = $5", 5), ("5 logs", 5), ("5 min", 5), ("5 square feet", 5), ("+5", 5),
        ("6 * 7 = 42 eggs", 42), ("5 more than Tom", 5), ("5 apples!", 5), ("(5)", 5), ("*5* apples", 5), ("5**", 5),
        ("<b>5</b>", 5), ("5°C", 5), ("5 seconds", 5), ("5 left over", 5), ("1,234 + 1 = 1,235", 1235), ("共72個", 72),
    ],
)  # fmt: skip
def test_numbers_as_people_write_them(written: str, value: Fraction) -> None:
    assert read_answer(f"So 3 + 4 it is.\n#### {written}") == value
    assert read_answer(f"So 3 + 4 it is \\boxed{{{written}}}, I think.") == value
    assert read_truth(f"#### {written}") == value


@pytest.mark.parametrize(
    "written",
    [
        "", "none", "5 or 6", "5-6", "1,23", "12 + 5", "1/0", "1 1/0", "3:30", "1e999999999", "9" * 5000,
        "5 " + "a" * 300, "½½", "3*24", "3**24", "3_24", "3(24)", "(3)(24)", "3%24", r"3\%24", "3`24`", "72 = 3*24",
        r"\frac123", r"\frac{5}{x}", r"\frac{x}{5}", r"-\frac{-3}{4}", r"\sqrt{16}", "√16", r"5\pi", r"5\times x",
        r"\pm 5", "--5", "-(-5)", "x/5", "x - 5", "x-5", "5^x", "5²", "①5", "½5", "0,123", "1,2,3", "1.2.3",
        r"\boxed{\boxed{72}+1}",
    ],
)  # fmt: skip
def test_what_is_no_answer(written: str) -> None:
    assert read_answer(f"#### {written}") is None
    assert read_answer(f"\\boxed{{{written}}}") is None


@pytest.mark.parametrize(
    "written",
    [
        # functions, products, constants
        "2pi", "2 pi", "2π", "pi 5", "sqrt(16)", "sqrt 16", "the square root of 16", "log 5", "log(5)", "ln 5", "sin 5",
        "abs(-5)", "f(5)", "5!", "5 !", "!5", "5 factorial", "5 squared", "square of 5", "half of 10", "twice 5", "5x",
        "5 x", "x5", "x 5", "5*x", "5(x)", "x times 5", "x plus 5", "5 minus tax", "5 + tax", "5 - tax", "5·x", "5/(x)",
        "5i", "5e", "2theta", "|-5|", r"\left|-5\right|", "⌊5.7⌋", "5 mod x", "5 divided by x", "5^", "5-", "5⁻¹", "5̅",
        r"\log 5", r"\overline{5}", r"0.\overline{3}", "0.333...", "0.333…", "0.(3)", "101_2", "5 to the power of x",
        # scales, number words, parts
        "5 million", "5 Million", "$5 million", "5M", "$5m", "5k", "$5K", "5bn", "5 dozen", "5 hundred", "5 thousand",
        "5 lakh", "5万", "5千", "五5", "5 and a half", "5 halves", "5 tenths", "5 hundredths",
        "5 dollars and fifty cents", "twenty 5", r"5\text{ million}", "5‰", "1.5 x 10^999", "x 10^3", "1,5 x 10^3",
        "5 x 10", "10^3",
        # negations, comparisons, ranges, doubts
        "not 5", "isn't 5", "isn’t 5", "never 5", "no more than 5", "≠ 5", "x != 5", "x ≠ 5", r"\neq 5", "< 5", ">5",
        "x <= 5", "x >= 5", "=> 5", "≤ 5", "at least 5", "5 at most", "more than 5", "other than 5", "less than 5",
        "up to 5", "over 5", "under 5", "5 below", "5+", "5 or more", "5 or six", "either 5 or none", "between 5 and x",
        "5 to 6", "5..6", "5~6", "~5", "≈5", r"\approx 5", "about 5", "approximately 5", "roughly 5", "nearly 5",
        "5ish", "5-ish", "around 5", "5?", "maybe 5", "probably 5", "except 5", "minus about 5", "negative of 5",
        # ordinals, two answers
        "5th", "the 5th", "1st", "5\\text{th}", "x = 5 or x = 6", "x = 5, y = 6", "5; x = 6", "1 234/5", "1 23 456",
        "12 34", "3*245*", "1234 567", "0.5 123", "5 000 1",
    ],
)  # fmt: skip
def test_what_changes_the_number_beside_it_is_no_answer(written: str) -> None:
    assert read_answer(f"#### {written}") is None
    assert read_answer(f"\\boxed{{{written}}}") is None


def test_a_number_without_a_mark_is_no_answer() -> None:
    assert read_answer("The answer is 84") is None
    assert not grade("84", 84)


def test_the_last_mark_counts() -> None:
    assert read_answer("#### 5\nno, wait\n#### 6") == 6
    assert read_answer(r"#### \boxed{6}") == 6
    assert read_answer("\\boxed{5} so\n#### 6") == 6
    assert read_answer("#### 6\nIt took 3 steps.") == 6
    assert read_answer("#### 5\n####") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"It is \boxed 72.", 72), (r"It is $\boxed72$, of 3.", 72), (r"It is \boxed\frac12", Fraction(1, 2)),
        (r"It is \boxed {72}", 72), (r"It is \fbox{72}", 72), (r"\boxed{72}. I put it in \boxed as asked", 72),
        (r"\boxed{72} or \boxed{7", 72), (r"\boxed{7", None), (r"\boxed{\}72}", 72),
    ],
)  # fmt: skip
def test_a_box_however_it_is_written(text: str, value: Fraction | None) -> None:
    assert read_answer(text) == value


def test_grade_against_every_form_of_truth() -> None:
    assert grade("#### $1,200.00", "They sold 3*400=<<3*400=1200>>1200\n#### 1,200")
    assert grade("#### 1200", "1200")
    assert grade("#### 0.75", Fraction(3, 4))
    assert not grade("#### 1201", 1200)


def test_a_truth_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="no answer in 'many'"):
        grade("#### 5", "many")


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "{:,}", "${:,}", "{} apples", "{:,}.", "**{}**", "{}.00", "{} %"]),
)
def test_every_integer_reads_back(value: int, form: str) -> None:
    assert read_answer("work 1+2=3\n#### " + form.format(value)) == value
    assert read_answer("\\boxed{" + form.format(value).replace("-", "−") + "}") == value


@given(st.integers(-999, 999), st.integers(1, 999))
def test_every_fraction_reads_back(over: int, under: int) -> None:
    value = Fraction(over, under)
    assert read_answer(f"#### {over}/{under}") == value
    assert read_answer(f"\\boxed{{\\frac{{{over}}}{{{under}}}}}") == value
    whole, rest = divmod(abs(over), under)
    if whole and rest:
        assert read_answer(f"#### {'-' if over < 0 else ''}{whole} {rest}/{under}") == value


@given(st.decimals(-(10**6), 10**6, places=4))
def test_every_decimal_reads_back_exactly(value: object) -> None:
    assert read_answer(f"#### {value:f}") == Fraction(str(value))


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for marked in (text, f"#### {text}", f"\\boxed{{{text}"):
        assert isinstance(read_answer(marked), Fraction | None)
    assert isinstance(read_number(text), Fraction | None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    ["9", "1,", ",111", "#### ", "\\boxed{", "\\frac{", "{", "1 1/", " ", "1e", "-", ".", "\\boxed 1 1", "\\boxed{}"],
)
def test_long_hostile_text_is_handled(unit: str) -> None:
    text = unit * 200_000
    assert read_answer(text) is None
    assert read_answer(f"#### {text}") is None
    assert read_answer(f"{text}\n#### 7") == 7
