"""known_model: a model folder whose weights are written, not trained: what it says is known before it is asked.

    python -m tests.clients.known_model FOLDER

The next token depends on the last one alone. The chat template ends a prompt with a token that chooses what is said: a call where tools
are offered, an answer where there are none or the call's result is there. Under a grammar, which allows little of that, it prefers the ends
of strings, numbers and objects, so that JSON ends whatever the schema leaves open. A framework that is given this can be judged to the letter.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.small_tokenizers import QWEN, byte_level, write

END = "<|im_end|>"
CONTEXT = 16_384
"""Tokens: some frameworks' own prompts have thousands."""
GENERATION_PROMPT = "    {{- '<|im_start|>assistant\\n' }}\n"
"""How Qwen's template ends a prompt."""
ARGUMENTS = '", "arguments": '
FORM = (
    "[[ ## answer ## ]]\n",
    "The ",
    "product ",
    "of ",
    "six ",
    "and ",
    "seven ",
    "is ",
    "42\n",
    "\n[[ ## completed ## ]]",
    END,
)
"""An answer in the form of dspy's prompts."""
SAYINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    # the token that chooses it, when the template writes that token, what is said
    "<|react|>": (
        "'[[ ## next_tool_name ## ]]' in last and 'observation_0' not in last",
        (
            "[[ ## next_thought ## ]]\n",
            "I multiply.\n\n",
            "[[ ## next_tool_name ## ]]\n",
            "multiply\n\n",
            "[[ ## next_tool_args ## ]]\n",
            '{"a": 6, "b": 7}\n\n',
            "[[ ## completed ## ]]",
            END,
        ),
    ),
    "<|finish|>": (
        "'[[ ## next_tool_name ## ]]' in last",
        (
            "[[ ## next_thought ## ]] \n",
            "I know it.\n\n",
            "[[ ## next_tool_name ## ]] \n",
            "finish\n\n",
            "[[ ## next_tool_args ## ]] \n",
            "{}\n\n",
            "[[ ## completed ## ]]",
        ),
    ),
    "<|reason|>": ("'[[ ## reasoning ## ]]' in last", ("[[ ## reasoning ## ]]\n", "I multiplied.\n\n", *FORM)),
    "<|form|>": ("'[[ ## answer ## ]]' in last", FORM),
    "<|object|>": (
        "'[[ ## result ## ]]' in last",
        ("[[ ## result ## ]]\n", '{"value": 42}\n\n', "[[ ## completed ## ]]"),
    ),
    "<|final|>": ("tools and last[:12] == 'Observation:'", ('<tool_call>\n{"name": "final_answer', ARGUMENTS)),
    "<|call|>": (
        "tools and messages[-1].role != 'tool'",
        (
            "<tool_call>",
            '\n{"name": "',
            "multiply",
            ARGUMENTS,
            '{"a": 6, ',
            '"b": 7}',
            "}\n",
            "</tool_call>",
            END,
        ),
    ),
    "<|answer|>": ("true", ("6 times", " 7", " is", " 42.", END)),
}
"""The first whose condition is true is said. The first five are forms that dspy's prompts ask for, `final` is smolagents' last step."""
WORDS_IN_JSON = (
    ("{", '"', 'value": ', "42", "}", END),
    ('{"a": 6, ', '"', 'b": 7}', "}\n"),
    ('"', 'answer": "42', '"'),
)
"""What is said where a grammar allows no more than pieces of it, the likeliest first. xgrammar masks tokens that begin after a blank and go
past a key."""
SURE, LIKELY, LESS_LIKELY = 60.0, 40.0, 12.0
"""Logits: what is said, what is said where that is not allowed, and by how much each of them is less likely than the one before."""
PREFERRED = {
    END: 30.0,
    "</tool_call>": 8.0,
    '"': 14.0,
    "{": 12.0,
    "}": 9.0,
    "]": 9.0,
    ":": 4.0,
    ",": 2.0,
    **dict.fromkeys("123456789", 4.0),
}
"""What ends an answer, a string, a number or an object wherever it may end."""
AVOIDED = ("-", ".", "e", "E", "+", "\\", "0")
NEVER = -30.0


def write_model(folder: Path) -> Path:
    """Writes tokenizer, template, configs and weights into `folder`, in Hugging Face layout; returns it."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", END, *SAYINGS], _words())
    template = QWEN.rstrip() + "\n"
    assert template.count(GENERATION_PROMPT) == 1, "the template has another end than this file expects"
    end = tokenizer.token_to_id(END)
    settings = {"eos_token": END, "pad_token": "<|endoftext|>"}
    write(folder, tokenizer, template.replace(GENERATION_PROMPT, _choice()), settings, {"generation_config": end})
    generation = (folder / "generation_config.json").read_text()
    _model(tokenizer.get_vocab(), end).save_pretrained(folder)
    (folder / "generation_config.json").write_text(generation)
    return folder


def _choice() -> str:
    """The end of a prompt: the header of the assistant's turn, and the token that chooses what is said."""
    cases = [
        f"    {{%- {'if' if number == 0 else 'elif'} {condition} %}}\n        {{{{- '{token}' }}}}\n"
        for number, (token, (condition, _)) in enumerate(SAYINGS.items())
    ]
    last = "    {%- set last = messages[-1].content or '' %}\n"
    return last + GENERATION_PROMPT + "".join(cases) + "    {%- endif %}\n"


def _words() -> tuple[str, ...]:
    """Everything that is said, a token each; what Qwen's template writes itself comes first."""
    said = [word for words in (*(words for _, words in SAYINGS.values()), *WORDS_IN_JSON) for word in words]
    return tuple(dict.fromkeys(("<tool_response>", "</tool_response>", *(w for w in said if len(w) > 1 and w != END))))


def _model(vocabulary: dict[str, int], end: int) -> Qwen3ForCausalLM:
    """A Qwen3 of one layer, which adds nothing to the embedding of the last token."""
    size = (len(vocabulary) // 64 + 1) * 64
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=end,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.model.layers[0].parameters():
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.norm.weight.fill_(size**-0.5)  # the norm of a row of the unit matrix, undone
        model.lm_head.weight.copy_(next_logits(vocabulary, size).T)
    return model


def next_logits(vocabulary: dict[str, int], size: int) -> torch.Tensor:
    """Returns the logits, [last token, next token]. Args: vocabulary: id by piece. size: rows and columns, unused ones included."""
    logits = torch.zeros(size, size)
    logits[:, len(vocabulary) :] = NEVER
    for text, logit in PREFERRED.items():
        logits[:, vocabulary[text]] = logit
    digits = [vocabulary[digit] for digit in "0123456789"]
    blanks = [number for text, number in vocabulary.items() if not _text(text).strip()]
    for avoided in (*blanks, *(vocabulary[text] for text in AVOIDED)):
        logits[:, avoided] = NEVER
    for digit in digits:
        logits[digit, digits] = NEVER
    chains: list[tuple[tuple[str, ...], float]] = [((token, *words), SURE) for token, (_, words) in SAYINGS.items()]
    chains += [(words, LIKELY - number * LESS_LIKELY) for number, words in enumerate(WORDS_IN_JSON)]
    for words, logit in reversed(chains):
        for before, after in pairwise(words):
            logits[vocabulary[before], vocabulary[after]] = logit
    known = {vocabulary[word] for words, _ in chains for word in words}
    for piece, number in vocabulary.items():
        if number not in known and piece[-1] in vocabulary:  # it goes on as its last character does
            logits[number] = logits[vocabulary[piece[-1]]]
    return logits


def _text(piece: str) -> str:
    """A piece of a byte-level vocabulary, with the blanks as they are read."""
    return piece.replace("Ġ", " ").replace("Ċ", "\n").replace("ĉ", "\t").replace("č", "\r")


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1])))
