"""The same key twice in one mapping of YAML, and numbers in base 8 or 60, are refused with their lines; what YAML offers to repeat stays allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cli.options import overrides
from pipelines.config.run_config import load_config
from serve_apps.authoring.yaml_text import read_yaml
from serve_apps.gateway.traffic.callers import read_keys

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iterations: 1\nrun: a\niterations: 5\n", r"^f:3: 'iterations' .* in lines 1 and 3: keep one"),
        ("train: {a: 1}\nb: 1\ntrain: {c: 1}\n", r"^f:3: 'train' .* in lines 1 and 3"),
        ("a:\n  b: 1\n  'b': 1\n", r"^f:3: 'b' .* in lines 2 and 3"),
        ("a: [{b: 1,\n b: 2}]\n", r"^f:2: 'b' .* in lines 1 and 2"),
        ("1: a\n0x1: b\n", r"^f:2: '0x1' .* in lines 1 and 2"),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  <<: *a\n", r"^f:4: '<<' .* in lines 3 and 4"),
        ("a: &a {x: 1, x: 2}\nb: *a\n", r"^f:1: 'x' .* in lines 1 and 1"),
        ("a: 1\niterations: 1:30\n", r"^f:2: YAML reads 1:30 as 90: write that number, or '1:30' with quotes"),
        ("seed: 010", r"^f:1: YAML reads 010 as 8"),
        ("at: [12:30:00.5]", r"^f:1: YAML reads 12:30:00.5 as 45000.5"),
        ("a: [", r"^f is not YAML"),
        ("[" * 5000, r"^f: lists or mappings within one another, too deep"),
        ("day: !!timestamp 2026-02-31", r"^f is not YAML: day"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_yaml(text, "f")


def test_anchors_and_merges_may_repeat_a_key() -> None:
    text = "z: &z {k: 0}\na: &a {<<: *z, k: 1}\nb: {<<: *a, k: 2}\nc: [{k: 1}, {k: 2}]\n? [1]\n: 1\n"
    with pytest.raises(ValueError, match="is not YAML"):  # a list is no key in Python, twice or not
        read_yaml(text, "f")
    data = read_yaml(text.partition("?")[0], "f")
    assert data == {"z": {"k": 0}, "a": {"k": 1}, "b": {"k": 2}, "c": [{"k": 1}, {"k": 2}]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-1E3", -1000.0),
        ("1.5e3", 1500.0),
        (".5e+1", 5.0),
        ("2.e1", 20.0),
        ("e3", "e3"),
        ("1e", "1e"),
        ("0x1e3", 483),
        ("1e-3s", "1e-3s"),
        ("2025-06-18", "2025-06-18"),
        ("2025-06-18T10:30:00Z", "2025-06-18T10:30:00Z"),
        ("yes", "yes"),
        ("No", "No"),
        ("off", "off"),
        ("true", True),
        ("False", False),
    ],
)
def test_numbers_dates_and_truth_values_are_those_of_json(text: str, value: object) -> None:
    data = read_yaml(f"settings: {{a: {text}}}", "f")
    assert data == {"settings": {"a": value}} and type(data["settings"]["a"]) is type(value)


@pytest.mark.parametrize("text", ["Use #1", "#fff", "5 # five"])
def test_a_change_of_which_yaml_would_drop_a_part_as_a_comment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--set 'workflow\.settings\.hint=.*is a comment in YAML: put the value into"):
        overrides([f"workflow.settings.hint={text}"])
    assert overrides([f'hint="{text}"', "hint2=a#b", f"hint3=['{text}']"]) == {
        "hint": text,
        "hint2": "a#b",
        "hint3": [text],
    }


def test_every_reader_of_yaml_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: demo\niterations: 1\niterations: 5\n")
    with pytest.raises(ValueError, match=r"run\.yaml:3: 'iterations' stands twice .* lines 2 and 3"):
        load_config(path)
    (tmp_path / "child.yaml").write_text("extends: run.yaml\n")
    with pytest.raises(ValueError, match=r"run\.yaml:3: 'iterations'"):
        load_config(tmp_path / "child.yaml")
    with pytest.raises(ValueError, match=r"--set train:1: 'lr' stands twice"):
        overrides(["train={lr: 1, lr: 2}"])


def test_a_field_that_stands_twice_in_the_file_of_keys_is_refused(tmp_path: Path) -> None:
    """The scopes of a key are what the file says, not what it says last."""
    path = tmp_path / "keys.json"
    digest = "0" * 64
    path.write_text(f'[{{"name": "web", "sha256": "{digest}", "scopes": ["call"], "scopes": ["admin"]}}]')
    with pytest.raises(ValueError, match=r"keys\.json: 'scopes' stands twice in the key 'web'"):
        read_keys(path)
    path.write_text(f'[{{"name": "web", "sha256": "{digest}", "scopes": ["call"]}}]')
    assert [key.scopes for key in read_keys(path)] == [("call",)]
