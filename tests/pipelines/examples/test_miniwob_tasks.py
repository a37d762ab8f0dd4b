"""Tasks of MiniWoB++, the demonstrator and what the actor sees, without a browser."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipelines.config.run_config import load_config
from serve_apps.authoring.agent import TracedText
from stores.types import Task
from tests.worlds.miniwob.demonstrator import demonstrate, right_action, right_element
from tests.worlds.miniwob.tasks import PAGES, SHARES, generate
from tests.worlds.miniwob.workflow import ROOT, element_line
from tests.worlds.miniwob.world import can_be_typed, elements_of

pytestmark = pytest.mark.fast

BOXES = "Select a1, Zq and click Submit.\n6 input_checkbox = on: a1\n8 input_checkbox = off: k\n10 input_checkbox = off: Zq\n11 button: Submit"


def node(tag: str, ref: int, *children: dict[str, object], **more: object) -> dict[str, object]:
    return {"tag": tag, "ref": ref, "id": "", "classes": "", "children": list(children), **more}


def test_no_seed_of_one_split_is_in_another() -> None:
    tasks = {split: generate(seed=1, split=split, count=80) for split in SHARES}
    seeds = {split: {tuple(t.metadata.values()) for t in own} for split, own in tasks.items()}
    assert len(set().union(*seeds.values())) == 80 * len(SHARES)
    assert Counter(task.source for task in tasks["train"]) == dict.fromkeys(PAGES, 20)
    assert generate(seed=1, split="train", count=80) == tasks["train"] != generate(seed=2, split="train", count=80)


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="miniwob: split 'dev' does not exist: use one of train, gate, test, sentinel"):
        generate(seed=0, split="dev", count=1)
    with pytest.raises(ValueError, match=r"miniwob: pages = \[\]: name some"):
        generate(seed=0, split="train", count=1, pages=[])
    with pytest.raises(ValueError, match=r"no page that the demonstrator knows: it asks 'Draw a line\.'"):
        right_element("Draw a line.")


@pytest.mark.parametrize(
    ("see", "number", "action"),
    [
        ("Click button ONE.\n4 button: ONE\n5 button: TWO", "4", "click 4"),
        ('Click on the "ok" button.\n4 div: nisl ok\n5 input_text = ""\n6 button: ok', "6", "click 6"),
        (
            'Enter "Ann" into the text field and press Submit.\n5 input_text = "Bo"\n6 button: Submit',
            "5",
            "type 5 Ann",
        ),
        ('Enter "Ann" into the text field and press Submit.\n5 input_text = "Ann"\n6 button: Submit', "6", "click 6"),
        (BOXES, "10", "click 10"),
        (BOXES.replace("off: k", "on: k"), "8", "click 8"),
        (BOXES.replace("off: Zq", "on: Zq"), "11", "click 11"),
    ],
)
def test_the_demonstrator_knows_the_next_element_and_what_to_do_with_it(see: str, number: str, action: str) -> None:
    assert right_element(see) == number
    assert right_action(see.partition("\n")[0], element_line(see, number)) == action
    task = Task(task_id="t", prompt="", answers=())
    said = Counter(demonstrate("reader", task, {"see": see}, random.Random(n)) for n in range(100))
    assert said.most_common(1)[0][0] == f"<ELEMENT>{number}</ELEMENT>" and len(said) > 1, "it is careless at times"


def test_the_actor_sees_the_line_of_the_element_and_both_events_are_its_parents() -> None:
    line = element_line(TracedText.by(BOXES, 3), TracedText.by(" 8 ", 4))
    assert (line, line.origins) == ("8 input_checkbox = off: k", {3, 4})
    assert [element_line(BOXES, number) for number in ("7", "", "Select", "1", "08")] == ["none"] * 4 + [line]


def test_text_behind_an_input_is_its_name_and_what_has_no_text_is_called_by_its_class() -> None:
    label = node("LABEL", 5, node("INPUT_checkbox", 6, value=False), node("t", -1, text=" a\n b "))
    words = node("P", 7, node("t", -2, text="two"), node("t", -3, text="lines"))
    mixed = node("DIV", 8, node("B", 9, text="bold"), node("t", -4, text="plain"))
    root = node(
        "BODY",
        1,
        label,
        words,
        mixed,
        node("SPAN", 10, classes="star"),
        node("BR", 11),
        node("INPUT_text", 12, value="x"),
    )
    assert list(map(str, elements_of(root))) == [
        "6 input_checkbox = off: a b",
        "7 p: two lines",
        "9 b: bold",
        "text: plain",
        "10 span: star",
        '12 input_text = "x"',
    ]


def test_only_what_a_keyboard_has_is_typed_and_only_where_words_go() -> None:
    assert all(can_be_typed("Zoë 7", tag) for tag in ("input_text", "input_password", "textarea", "select"))
    assert not any(can_be_typed("a", tag) for tag in ("button", "input_checkbox", "input_submit", "div", "text"))
    assert not any(can_be_typed(words, "input_text") for words in ("a\ue007", "a\nb", "\U0001f600"))


def test_its_run_config_is_valid() -> None:
    config = load_config(ROOT / "tests" / "worlds" / "miniwob" / "run.yaml")
    assert config.workflow.path == "tests.worlds.miniwob.workflow:Browsing"
