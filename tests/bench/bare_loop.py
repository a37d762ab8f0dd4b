"""A peer: a bare PyTorch loop. One forward for old logprobs, then forward, PPO clip loss, backward, AdamW.

    python -m tests.bench.bare_loop MODEL_FOLDER THREADS LR SCRATCH
    {"rows": file} -> {"old_s", "update_s", "save_s", "loss"}

The file holds rows {"ids", "prompt_length", "advantage"} and the cuts: `score` (microbatches of the first forward) and
`steps` (microbatches of every optimizer step). Nothing of Troupe is imported.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.bench.peer import answer_questions

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def main() -> None:
    """The peer; model and optimizer are kept between questions."""
    folder, threads, lr, scratch = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def learn(question: dict[str, Any]) -> dict[str, Any]:
        data = json.loads(Path(question["rows"]).read_text())
        rows = data["rows"]
        began = time.perf_counter()
        old: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for cut in data["score"]:
                logprobs = _logprobs(model, _batch(rows, cut))
                old |= {row: logprobs[i] for i, row in enumerate(cut)}
        scored = time.perf_counter()
        loss = torch.zeros(())
        for step in data["steps"]:
            num_tokens = sum(len(rows[i]["ids"]) - rows[i]["prompt_length"] for cut in step for i in cut)
            for cut in step:
                batch = _batch(rows, cut)
                loss = _loss(_logprobs(model, batch), [old[i] for i in cut], batch) / num_tokens
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        last = float(loss.detach())
        updated = time.perf_counter()
        model.save_pretrained(scratch)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, scratch / "checkpoint.pt")
        saved = time.perf_counter()
        return {"old_s": scored - began, "update_s": updated - scored, "save_s": saved - updated, "loss": last}

    answer_questions(learn)


def _batch(rows: list[dict[str, Any]], cut: list[int]) -> Batch:
    """Token ids [B, T], mask of completion targets [B, T-1], advantages [B, 1]."""
    longest = max(len(rows[i]["ids"]) for i in cut)
    ids, mask = torch.zeros((len(cut), longest), dtype=torch.long), torch.zeros((len(cut), longest - 1))
    for at, i in enumerate(cut):
        row = rows[i]
        ids[at, : len(row["ids"])] = torch.tensor(row["ids"])
        mask[at, row["prompt_length"] - 1 : len(row["ids"]) - 1] = 1.0
    return ids, mask, torch.tensor([[rows[i]["advantage"]] for i in cut])


def _logprobs(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch[0], use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, batch[0][:, 1:, None])[..., 0]


def _loss(logprobs: torch.Tensor, old: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    _, mask, advantages = batch
    width = mask.shape[1]
    padded = torch.stack([torch.nn.functional.pad(o, (0, width - len(o)))[:width] for o in old])
    ratio = torch.exp((logprobs - padded) * mask)
    return (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum()


if __name__ == "__main__":
    main()
