"""end_tokens: a model folder -> the tokens that its config and its generation config say end a completion, all of them.

The two may differ, and the tokenizer may name a third: a base model's configs name the end of a document where its tokenizer
names the end of a turn. `ChatTokenizer.end_ids` has the tokens of all three.
"""

from __future__ import annotations

from pathlib import Path

from stores.files import read_json_object


def configured_end_ids(folder: Path) -> list[int]:
    """Returns the ids in ascending order; ValueError names the file whose `eos_token_id` is no token id."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        settings = read_json_object(file)
        for part in (settings, settings.get("text_config")):
            eos = part.get("eos_token_id") if isinstance(part, dict) else None
            for token in eos if isinstance(eos, list) else [] if eos is None else [eos]:
                if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                    raise ValueError(f"{file}: eos_token_id = {eos!r} is no token id and no list of them: correct it")
                ids.add(token)
    return sorted(ids)
