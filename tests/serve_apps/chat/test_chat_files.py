"""chat_files: what a chat template has to write, and what published ones may refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tokenizers import FAMILIES, build

from pipelines.extensions.models.known import GEMMA_TEMPLATE
from serve_apps.chat.chat_files import check_chat_files
from train_loops.engine.tiny_model import CHAT_TEMPLATE

pytestmark = pytest.mark.test

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = LOOP + HEADER
PHI = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
VICUNA = "{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}\n{% endfor %}ASSISTANT:"
BARE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHTS = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
BLANKS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen", tmp_path_factory.mktemp("qwen"))


def check(folder: Path, template: str) -> list[str]:
    (folder / "chat_template.jinja").write_text(template)
    return check_chat_files(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_templates_are_ok(family: str, tmp_path: Path) -> None:
    refused = ["chat_template.jinja refuses a system message: no agent can have one"]
    assert check_chat_files(build(family, tmp_path)) == (refused if family == "gemma" else [])


@pytest.mark.parametrize(
    "template",
    [CHATML, PHI, VICUNA, BARE, HARMONY, THOUGHTS, BLANKS, GEMMA_TEMPLATE, CHAT_TEMPLATE, CHATML + "<think>\n"],
)
def test_a_template_that_writes_all_is_ok(template: str, folder: Path) -> None:
    assert check(folder, template) == []


WITHOUT_SYSTEM = CHATML.replace("messages %}", "messages if m.role != 'system' %}")
LOST = {
    # a template, what is wrong with it
    "no system branch": (WITHOUT_SYSTEM, "leaves out the system message"),
    "the last message only": (CHATML.replace("in messages", "in messages[-1:]"), "leaves out what the user says first"),
    "users only": (CHATML.replace("messages %}", "messages if m.role == 'user' %}"), "leaves out what the assistant says"),
    "the last is cut": (CHATML.replace("in messages", "in messages[:-1]"), "leaves out what the user says last"),
    "backwards": (CHATML.replace("in messages", "in messages | reverse"), "changes the order of the messages"),
    "no header": (LOOP, "writes no header for the assistant's answer"),
    "no header, plain": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "writes no header"),
    "no header, tags": ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}", "writes no header"),
    "no header after a system message": (
        LOOP + HEADER.replace("if add", "if messages[0].role == 'user' and add"),
        "writes no header",
    ),
    "all but the last where none is asked for": (
        LOOP.replace("in messages", "in (messages if add_generation_prompt else messages[:-1])") + HEADER,
        "writes another conversation where add_generation_prompt is false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_a_template_that_loses_a_part_is_refused_with_what_is_lost_and_the_fix(case: str, folder: Path) -> None:
    template, wrong = LOST[case]
    with pytest.raises(ValueError) as caught:
        check(folder, template)
    said = str(caught.value)
    assert said.startswith(f"{folder / 'chat_template.jinja'}: the chat template {wrong}"), said
    assert said.endswith("correct it, or copy it from the model's source")


def test_a_template_that_shows_tools_and_loses_their_calls_is_noted(folder: Path) -> None:
    (note,) = check(folder, "{{ tools }}" + CHATML)
    assert "leaves out the arguments of a tool's call" in note
