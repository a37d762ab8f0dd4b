"""masks: what a constrained turn could have said is made again from its constraint, and its logprobs are over that alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chained_samples import sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.openai_api.constraints import constraint_text
from stores.traces.conventions import constraint_of
from train_loops.config import MismatchConfig
from train_loops.engine import logprobs as logprobs_module
from train_loops.engine.logprobs import PolicyScorer
from train_loops.rows.batching import collate
from train_loops.rows.masks import with_masks
from train_loops.rows.samples import Sample
from train_loops.signal.mismatch import measure

pytestmark = pytest.mark.fast

YES_OR_NO = {"grammar": 'root ::= "yes" | "no"'}
SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "boolean"}},
    "required": ["value"],
    "additionalProperties": False,
}
PREFIX = "What is it? "


class Rows:
    """Makes rows of the tiny model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.end: int = self.tokenizer.eos_token_id

    def row(self, text: str, form: dict[str, object] | None, *, number: int = 0) -> Sample:
        """A row whose completion is `text` and the end of the turn."""
        prompt, said = (self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in (PREFIX, text))
        constraint = "" if form is None else json.dumps(form | {"end_ids": [self.end]})
        return sample(
            f"e{number}", 0, prompt, [*said, self.end], agent="solver", temperature=0.7, constraint=constraint
        )


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> Rows:
    return Rows(tiny_model)


@pytest.fixture(scope="module")
def scorer(tiny_model: Path) -> PolicyScorer:
    return PolicyScorer(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))


def begins(rows: Rows, allowed: list[str]) -> set[int]:
    """The tokens that are a beginning of one of these texts."""
    texts = {i: rows.tokenizer.decode([i]) for i in range(len(rows.tokenizer))}
    special = set(rows.tokenizer.all_special_ids)
    return {i for i, t in texts.items() if t and i not in special and any(a.startswith(t) for a in allowed)}


def of_token(sample: Sample, position: int, vocabulary: int) -> set[int]:
    """The tokens that a mask allows."""
    assert sample.masks is not None
    words = sample.masks.table[sample.masks.of_token[position]]
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocabulary]
    return set(np.flatnonzero(bits).tolist())


def test_every_position_allows_what_the_form_does(rows: Rows) -> None:
    yes, free = with_masks([rows.row("yes", YES_OR_NO), rows.row("what", None)], rows.folder)
    vocabulary = len(rows.tokenizer)
    assert free.masks is None
    assert of_token(yes, 0, vocabulary) == begins(rows, ["yes", "no"])
    assert of_token(yes, yes.completion_length - 1, vocabulary) == {rows.end}, "only the end is left"
    prompt, (other,) = (rows.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (PREFIX, "z"))
    stored = json.dumps(YES_OR_NO | {"end_ids": [other]})
    said = yes.token_ids[yes.prompt_length : -1]
    (ends,) = with_masks([sample("e0", 0, prompt, [*said, other], agent="solver", constraint=stored)], rows.folder)
    assert of_token(ends, len(said), vocabulary) == {other}, "the ends that are stored, not the tokenizer's own"


@pytest.mark.parametrize(
    "form",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"regex": r"\{\"value\": (true|false)\}"},
        {"grammar": 'root ::= "{\\"value\\": " ("true" | "false") "}"'},
        {"grammar": 'start: "{\\"value\\": " ("true" | "false") "}"'},
        {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}})},
    ],
    ids=["schema", "schema as text", "regex", "ebnf", "lark", "structural tag"],
)  # fmt: skip
def test_every_kind_of_form_is_made_again_and_another_text_is_refused(rows: Rows, form: dict[str, object]) -> None:
    (row,) = with_masks([rows.row('{"value": true}', form)], rows.folder)
    assert row.masks is not None and (row.masks.of_token > 0).all()
    with pytest.raises(
        ValueError, match=r"episode e7, turn 0 \(solver\): token \d+ at position \d+ of the completion is not"
    ):
        with_masks([rows.row('{"worth": true}', form, number=7)], rows.folder)


def test_a_string_holds_no_control_token(rows: Rows) -> None:
    constraint = constraint_text({"json": {"type": "string"}}, ChatTokenizer(rows.folder))
    prompt, said = (rows.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (PREFIX, '"yes"'))
    (row,) = with_masks([sample("e0", 0, prompt, said, agent="solver", constraint=constraint)], rows.folder)
    control = {rows.tokenizer.convert_tokens_to_ids(text) for text in ("<|pad|>", "<|im_start|>")}
    for position in range(len(said)):
        assert not control & of_token(row, position, len(rows.tokenizer))
    spoilt = [*said[:-1], max(control), said[-1]]
    with pytest.raises(ValueError, match=f"token {max(control)} at position {len(said) - 1} .* is not allowed"):
        with_masks([sample("e0", 0, prompt, spoilt, agent="solver", constraint=constraint)], rows.folder)


def test_a_control_token_that_the_form_spells_is_allowed(tiny_model: Path) -> None:
    tokenizer = ChatTokenizer(tiny_model)
    free = constraint_text({"regex": "x"}, tokenizer)
    spelt = constraint_text({"grammar": 'root ::= "<|im_start|>"'}, tokenizer)
    assert (len(json.loads(free)["never"]), len(json.loads(spelt)["never"])) == (2, 1)


def test_logprobs_and_entropy_are_over_the_allowed_tokens_and_other_rows_stay(
    rows: Rows, scorer: PolicyScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [
        rows.row("yes", YES_OR_NO),
        rows.row("what", None, number=1),
        rows.row('{"value": true}', {"json": SCHEMA}, number=2),
    ]
    masked = with_masks(plain, rows.folder)
    for pack in (False, True):
        batch = collate(masked, [(0,), (1,), (2,)], pack=pack)
        with torch.no_grad():
            logprobs, entropy, _ = scorer(batch, with_entropy=True)
        at = 0
        for row in masked:
            with torch.no_grad():
                logits = scorer.model(torch.tensor([list(row.token_ids)])).logits[0].float() / row.temperature
            for position in range(row.completion_length):
                own = logits[row.prompt_length + position - 1]
                if row.masks is not None:
                    keep = sorted(of_token(row, position, len(own)))
                    own = torch.full_like(own, -torch.inf).index_copy(0, torch.tensor(keep), own[keep])
                want = own.log_softmax(-1)
                torch.testing.assert_close(logprobs[at], want[row.token_ids[row.prompt_length + position]])
                torch.testing.assert_close(entropy[at], -(want.exp() * want.nan_to_num(neginf=0.0)).sum())
                at += 1
    monkeypatch.setattr(logprobs_module, "CHUNK_TOKENS", 3)
    logprobs, entropy, _ = scorer(collate(masked, [(0,), (1,), (2,)]), with_entropy=True)
    (logprobs + entropy).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in scorer.parameters() if p.grad is not None)
    forced = collate(with_masks([rows.row("yes", {"grammar": 'root ::= "yes"'})], rows.folder), [(0,)])
    assert float(scorer(forced)[0][-1]) == 0.0, "a token without an alternative is certain"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_choice_is_sampled_among_its_options_alone(rows: Rows, scorer: PolicyScorer, data: st.DataObject) -> None:
    vocabulary = scorer.model.config.vocab_size
    offered = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=20, unique=True))
    temperature = data.draw(st.sampled_from([0.5, 1.0, 1.3]))
    plain = [
        replace(
            rows.row("", None, number=i),
            token_ids=[*rows.row("", None).token_ids[:-1], token],
            rollout_logprobs=[-0.5],
            temperature=temperature,
            constraint=constraint_of(offered),
        )
        for i, token in enumerate(offered)
    ]
    samples = with_masks([rows.row("what", None, number=99), *plain], rows.folder)
    assert all(of_token(sample, 0, vocabulary) == set(offered) for sample in samples[1:])
    alone = [(i,) for i in range(len(samples))]
    with torch.no_grad():
        padded, entropy, _ = scorer(collate(samples, alone), with_entropy=True)
        packed, _, _ = scorer(collate(samples, alone, pack=True))
        logits = scorer.model(torch.tensor([list(plain[0].token_ids)[:-1]])).logits[0, -1].float() / temperature
    want = logits[torch.tensor(offered)].log_softmax(-1)
    choices = padded[-len(offered) :]
    torch.testing.assert_close(choices, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed[-len(offered) :], want, atol=1e-5, rtol=0)
    assert float(choices.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(entropy[-1], -(want.exp() * want).sum(), atol=1e-5, rtol=0)


def test_a_choice_that_was_not_offered_ends_the_job_by_name(rows: Rows) -> None:
    row = replace(rows.row("yes", None, number=7), constraint=constraint_of([5, 6]))
    with pytest.raises(
        ValueError, match=r"episode e7, turn 0 \(solver\): token \d+ at position 0 of the completion is not allowed"
    ):
        with_masks([row], rows.folder)
    beyond = replace(row, constraint=constraint_of([5, 10**6]))
    with pytest.raises(ValueError, match="token 1000000 was offered, which the model does not have"):
        with_masks([beyond], rows.folder)
    assert with_masks([replace(beyond, is_served=True)], rows.folder) == [], "a row from service is left out"


def test_a_mask_that_is_not_the_engines_shows_as_a_difference_between_trainer_and_engine(
    rows: Rows, scorer: PolicyScorer
) -> None:
    row = rows.row("yes", YES_OR_NO)

    def old(sample: Sample) -> np.ndarray:
        with torch.no_grad():
            return scorer(collate([sample], [(0,)]))[0].double().numpy()

    (right,) = with_masks([row], rows.folder)
    wider = {"grammar": "root ::= [a-z]+"}
    (wrong,) = with_masks([replace(row, constraint=json.dumps(wider | {"end_ids": [rows.end]}))], rows.folder)
    engine = old(right)
    gap = {
        name: measure([old(sample)], [engine], ["solver"], config=MismatchConfig())["solver"].mean_abs
        for name, sample in (("right", right), ("wrong", wrong), ("none", row))
    }
    assert gap["right"] == 0 and min(gap["wrong"], gap["none"]) > 0.5


def test_a_constraint_without_a_grammar_ends_the_job_by_name_and_a_served_row_is_left_out(rows: Rows) -> None:
    broken = rows.row("yes", {"grammar": "root ::= ("}, number=5)
    with pytest.raises(ValueError, match=r"episode e5, turn 0 \(solver\): there is no grammar of its constraint"):
        with_masks([broken], rows.folder)
    left = with_masks([replace(broken, is_served=True), rows.row("no", YES_OR_NO)], rows.folder)
    assert [row.episode_id for row in left] == ["e0"]


def test_lark_is_told_from_ebnf_as_the_engine_tells_it(rows: Rows) -> None:
    odd = {"grammar": 'start: "yes" | "no" // either\u2028 not x ::= y'}
    (row,) = with_masks([rows.row("yes", odd)], rows.folder)
    assert row.masks is not None
