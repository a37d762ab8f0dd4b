"""Output contracts: what is read, and what counts as a fault."""

from __future__ import annotations

import pytest

from serve_apps.authoring.contracts import Boxed, JsonKeys, OneOf, Raw, Tags, Thinking

pytestmark = pytest.mark.fast

BOTH = Tags("SOLUTION", "ANSWER")
STATUS = Tags("STATUS", choices={"STATUS": ("correct", "incorrect")})


def test_a_well_formed_completion_has_fields_and_no_fault() -> None:
    parsed = BOTH.parse("<SOLUTION>2*3=6</SOLUTION>\n<ANSWER> 6 </ANSWER>")
    assert (parsed.fields, parsed.fault) == ({"solution": "2*3=6", "answer": "6"}, "")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<SOLUTION>x</SOLUTION><ANSWER>6", "0 <ANSWER> blocks, expected 1"),
        ("<SOLUTION>x</SOLUTION><ANSWER>6</ANSWER><ANSWER>7</ANSWER>", "2 <ANSWER> blocks, expected 1"),
        ("<SOLUTION>x</SOLUTION><ANSWER> </ANSWER>", "<ANSWER> is empty"),
        ("so: <SOLUTION>x</SOLUTION><ANSWER>6</ANSWER>", "text outside the tags: 'so:'"),
        ("<ANSWER>6</ANSWER><SOLUTION>x</SOLUTION>", "tags out of order, expected SOLUTION, ANSWER"),
    ],
)
def test_a_broken_format_is_named(text: str, fault: str) -> None:
    assert BOTH.parse(text).fault == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<SOLUTION>x</SOLUTION><ANSWER><ANSWER>6</ANSWER>", "<ANSWER> inside <ANSWER>"),
        ("<SOLUTION><SOLUTION>x</SOLUTION><ANSWER>6</ANSWER>", "<SOLUTION> inside <SOLUTION>"),
        (
            "<SOLUTION>x</SOLUTION><ANSWER>5</SOLUTION><ANSWER>6</ANSWER>",
            "</SOLUTION> inside <ANSWER>",
        ),
        ("<SOLUTION>x<ANSWER>6</ANSWER></SOLUTION>", "<ANSWER> inside <SOLUTION>"),
        ("<SOLUTION>x<ANSWER>6</SOLUTION></ANSWER>", "<ANSWER> inside <SOLUTION>"),
        ("<SOLUTION>x</ANSWER></SOLUTION><ANSWER>6</ANSWER>", "</ANSWER> inside <SOLUTION>"),
        ("<SOLUTION>x<ANSWER/></SOLUTION><ANSWER>6</ANSWER>", "<ANSWER/> inside <SOLUTION>"),
        ("<SOLUTION>x</SOLUTION><ANSWER>5</ANSWER ><ANSWER y='1'>6</ANSWER>", "</ANSWER > inside <ANSWER>"),
        ("<SOLUTION>x</SOLUTION><ANSWER>5< / ANSWER><\n ANSWER >6</ANSWER>", "< / ANSWER> inside <ANSWER>"),
        ("<SOLUTION>x<ANSWER y='1'>5</SOLUTION><ANSWER>6</ANSWER>", "<ANSWER y='1'> inside <SOLUTION>"),
        ("<SOLUTION>x</SOLUTION><ANSWER>5<ANSWER /></ANSWER>", "<ANSWER /> inside <ANSWER>"),
        ("<SOLUTION>x</SOLUTION><ANSWER>6</ANSWER ></ANSWER>", "</ANSWER > inside <ANSWER>"),
        ("<SOLUTION>x</SOLUTION><ANSWER>a <ANSWERS y='1'> < b</ANSWER>", ""),
        ("<SOLUTION>x</SOLUTION><ANSWER>6</ANSWER></ANSWER>", "text outside the tags: '</ANSWER>'"),
        ("<SOLUTION>a <b> </c> < </SOLUTION><ANSWER><answer></ANSWER>", ""),
    ],
)
def test_a_tag_of_the_contract_inside_of_a_block_is_a_fault(text: str, fault: str) -> None:
    assert BOTH.parse(text).fault == fault
    assert Thinking(BOTH).parse(f"<think>or <ANSWER>7</ANSWER>?</think>{text}").fault == fault, "thoughts are free"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<search><search>x</search>", "<search> inside <search>"),
        ("<search>x</end></search>", "</end> inside <search>"),
        ("<search>x<end/></search>", "<end/> inside <search>"),
        ("<search>x<end></search></end>", "<end> inside <search>"),
        ("<search>x</search ></search>", "</search > inside <search>"),
        ("<search>x<ending/></search>", ""),
    ],
)
def test_a_tag_inside_of_the_one_that_was_chosen_is_a_fault(text: str, fault: str) -> None:
    parsed = OneOf("search", "end", may_be_empty=("end",)).parse(text)
    assert (parsed.fields["choice"], parsed.fault) == ("search", fault)


def test_half_of_a_surrogate_pair_which_no_next_agent_could_read_is_a_fault() -> None:
    assert JsonKeys("n").parse(r'{"n": "\ud83d"}').fault == "no JSON object"
    assert JsonKeys("n").parse(r'{"n": "\ud83d\ude00 \u00e9"}').fields == {"n": "\N{GRINNING FACE} é"}


def test_an_object_is_read_behind_thoughts_which_are_a_fault_and_may_itself_speak_of_them() -> None:
    thought = JsonKeys("n").parse('<think>{"n": 1}?</think>\n```json\n{"n": 2}\n```')
    assert (thought.data, thought.fault) == ({"n": 2}, "text outside the JSON object: thoughts")
    spoken = JsonKeys("n").parse('{"n": "<think>hm</think> 2"}')
    assert (spoken.fields, spoken.fault) == ({"n": "<think>hm</think> 2"}, "")
    assert JsonKeys("n").parse('<think>{"n": 1}').fault == "no JSON object"


@pytest.mark.parametrize("number", ["1" * 10_000, "NaN", "-Infinity", "1e999"])
def test_a_number_that_json_or_python_has_not_is_a_fault_and_no_error(number: str) -> None:
    assert JsonKeys("n").parse(f'{{"n": {number}}}').fault == "no JSON object"


def test_blocks_that_can_be_read_are_offered_even_where_the_format_is_broken() -> None:
    assert BOTH.parse("<SOLUTION>x</SOLUTION><ANSWER>6").fields == {"solution": "x", "answer": ""}


def test_a_choice_is_compared_in_lower_case_and_others_are_a_fault() -> None:
    assert STATUS.parse("<STATUS>Correct</STATUS>").fields == {"status": "correct"}
    assert STATUS.parse("<STATUS>maybe</STATUS>").fault == "<STATUS> is 'maybe', expected one of correct, incorrect"


def test_a_choice_is_read_as_the_contract_writes_it() -> None:
    verdict = Tags("VERDICT", choices={"VERDICT": ("Approve", "Reject")})
    for text in ("Approve", "APPROVE", "approve"):
        parsed = verdict.parse(f"<VERDICT>{text}</VERDICT>")
        assert (parsed.fields["verdict"], parsed.fault) == ("Approve", "")
    assert verdict.parse("<VERDICT>no</VERDICT>").fault == "<VERDICT> is 'no', expected one of Approve, Reject"
    with pytest.raises(ValueError, match="choices of VERDICT are one text"):
        Tags("VERDICT", choices={"VERDICT": "Approve"})  # type: ignore[dict-item]


@pytest.mark.parametrize(("kind", "names"), [(OneOf, ("ANSWER", "CHOICE")), (Tags, ("Answer", "ANSWER"))])
def test_a_tag_whose_field_would_hide_another_is_refused(
    kind: type[Tags] | type[OneOf], names: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=f"has two fields '{names[1].lower()}': rename a tag"):
        kind(*names)


def test_a_missing_verdict_is_a_fault_and_not_an_approval() -> None:
    parsed = STATUS.parse("looks fine")
    assert parsed.fault
    assert parsed.fields["status"] == ""


def test_raw_takes_anything_but_nothing() -> None:
    assert Raw().parse(" hello ").fields == {"text": "hello"}
    assert Raw().parse(" ").fault == "empty completion"


def test_choices_for_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="VERDICT"):
        Tags("STATUS", choices={"VERDICT": ("yes",)})


def test_blocks_may_have_a_number_of_words_at_most() -> None:
    short = Tags("A", max_words={"A": 2})
    assert (short.parse("<A>one two</A>").fault, short.parse("<A>1 2 3</A>").fault) == (
        "",
        "<A> has 3 words, at most 2 are allowed",
    )


@pytest.mark.parametrize(
    ("text", "choice", "fault"),
    [
        ("<search>x</search>", "search", ""),
        ("<search> </search>", "search", "<search> is empty"),
        ("<end></end>", "end", ""),
        ("<end/>", "end", ""),
        ("<search>x", "", "none of <search>, <end>"),
        ("<search>x</search><end/>", "search", "text outside <search>: '<end/>'"),
    ],
)
def test_one_of_several_tags_decides(text: str, choice: str, fault: str) -> None:
    parsed = OneOf("search", "end", may_be_empty=("end",)).parse(text)
    assert (parsed.fields["choice"], parsed.fault) == (choice, fault)


@pytest.mark.parametrize(
    ("text", "fields", "data"),
    [
        ('{"q": ["a", "", "b", "c"], "n": 8}', {"q": '["a", "b"]', "n": "8"}, {"q": ["a", "b"], "n": 8}),
        ('```json\n{"q": "a ", "n": false}\n```', {"q": "a", "n": "false"}, {"q": "a", "n": False}),
        ('{"q": [], "n": 1}', {"q": "", "n": "1"}, {"n": 1}),
        ("nothing", {"q": "", "n": ""}, {}),
    ],
)
def test_json_values_stay_what_they_are(text: str, fields: dict[str, str], data: dict[str, object]) -> None:
    parsed = JsonKeys("q", "n", max_items=2).parse(text)
    assert (parsed.fields, parsed.data) == (fields, data)
    assert bool(parsed.fault) == (len(data) < 2)


@pytest.mark.parametrize(
    ("text", "value", "is_ok"),
    [
        ("<think>so</think><A>1</A>", "1", True),
        ("<A>1</A>", "1", False),
        ("<think>a</think><think>b</think><A>1</A>", "1", False),
        ("<think>no end<A>1</A>", "", False),
    ],
)
def test_thoughts_stand_before_everything_else(text: str, value: str, is_ok: bool) -> None:
    parsed = Thinking(Tags("A")).parse(text)
    assert (parsed.fields["a"], not parsed.fault) == (value, is_ok)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>first <A>41</A></think><A>40</A>", "40"),
        ("first <A>41</A></think><A>40</A>", "40"),
        ("<think>first <A>41</A>", ""),
        ("<A>40</A>", "40"),
    ],
)
def test_what_a_model_thinks_is_no_field(text: str, value: str) -> None:
    parsed = [Tags("A").parse(text), OneOf("A", "B").parse(text)]
    assert [p.fields["a"] for p in parsed] == [value, value]
    assert [bool(p.fault) for p in parsed] == [text != "<A>40</A>"] * 2
    boxed = text.replace("<A>", "\\boxed{").replace("</A>", "}")
    assert Boxed().parse(boxed).fields["answer"] == value


def test_the_last_box_is_the_answer() -> None:
    assert Boxed().parse(r"\boxed{1} no: \boxed{\frac{1}{2}}.").fields["answer"] == r"\frac{1}{2}"
    assert Boxed().parse(r"$\boxed{1}$ and $\boxed{2}$").fields["answer"] == "1, 2"
    assert Boxed().parse(r"so \boxed{1").fault and Boxed().parse(r"\boxed{ }").fault


@pytest.mark.parametrize(
    "answer", [r"\left\{\begin{array}{l} x \\ -x\end{array}\right.", r"\{1, 2\}", r"{\}}", r"a \\{b}"]
)
def test_a_brace_that_is_written_out_closes_no_box(answer: str) -> None:
    assert Boxed().parse(rf"\boxed{{0}}. So \boxed{{{answer}}}.").fields["answer"] == answer
    assert Boxed().parse(r"as JSON: \\boxed{3}").fields["answer"] == "3"
