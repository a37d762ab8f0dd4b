"""check: a model folder -> a greedy answer and the perplexity of a plain paragraph, by transformers alone.

A folder whose files fit together may still hold a model that says nothing: weights in another order, a tokenizer of another
model, a missing `<bos>`. Perplexity of the paragraph, beside that of its words shuffled, tells in a second.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train_loops.engine.tiny_model import PARAGRAPH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

QUESTION = "What is the capital of France?"
MAX_ANSWER_TOKENS = 40
KNOWS_LANGUAGE = 3.0
"""How many times more a token of shuffled words must surprise a model than one of the paragraph, for it to know the language."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a model said, and what it expected."""

    answer: str
    is_ended: bool
    """Whether it ended its answer by itself."""
    num_tokens: int
    """Tokens of the paragraph."""
    num_rows: int
    """Rows of the vocabulary: a model that guesses has this perplexity."""
    perplexity: float
    shuffled_perplexity: float

    @property
    def is_broken(self) -> bool:
        """Whether guessing would be better."""
        return not self.perplexity < self.num_rows  # not a number is broken, too

    def judgement(self) -> str:
        """What the figures mean, in one line."""
        if self.is_broken:
            return (
                "broken: guessing at random would be better, so the weights were read wrongly or belong to another tokenizer or another "
                "config.json"
            )
        times = self.shuffled_perplexity / self.perplexity
        if times < KNOWS_LANGUAGE:
            return (
                f"knows no English: shuffled words surprise it only {times:.1f} times as much as a plain paragraph; right for a model that "
                "was made from nothing, wrong for a pretrained one"
            )
        end = (
            "" if self.is_ended else f"; it did not end its answer within {MAX_ANSWER_TOKENS} tokens, as base models do"
        )
        return f"sane: shuffled words surprise it {times:.0f} times as much as a plain paragraph{end}"


def ask_model(folder: Path) -> Answers:
    """Loads a checked folder in float32, and measures it; about 5 bytes of memory per parameter."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from serve_apps.chat.tokenizer import ChatTokenizer

    logging.disable_progress_bar()
    tokenizer = ChatTokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    ids = torch.tensor([prompt])
    ends = sorted(tokenizer.end_ids)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_ANSWER_TOKENS,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
    said = out[0, len(prompt) :].tolist()
    # A model that was trained with a token at the beginning gets it here as its chat template gives it.
    bos = tokenizer.hugging_face.bos_token_id
    begin = [bos] if prompt[:1] == [bos] else []
    words = PARAGRAPH.split()
    random.Random(0).shuffle(words)
    paragraph = tokenizer.encode(PARAGRAPH)
    return Answers(
        answer=tokenizer.decode(said).strip(),
        is_ended=bool(said) and said[-1] in tokenizer.end_ids,
        num_tokens=len(paragraph),
        num_rows=int(model.get_input_embeddings().weight.shape[0]),
        perplexity=_perplexity(model, begin, paragraph),
        shuffled_perplexity=_perplexity(model, begin, tokenizer.encode(" ".join(words))),
    )


def _perplexity(model: PreTrainedModel, begin: Sequence[int], text: Sequence[int]) -> float:
    """exp of the mean negative logprob per token of `text` after `begin`; the first token counts only where one is before it."""
    import torch

    ids = torch.tensor([[*begin, *text]])
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    mean = -float(logprobs.mean())
    return math.exp(mean) if mean < 700 else math.inf
