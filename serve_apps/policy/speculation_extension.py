"""speculation_extension: a vLLM worker that was started with a drafter -> one whose drafts change no token.

vLLM mixes it into its worker class, see weights_extension.py. All that Troupe changes in vLLM's runner for speculation is here.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_apps.policy.wire import WireCompletion
from stores.weights.model_folder import num_known_rows

if TYPE_CHECKING:
    from collections.abc import Sequence


class SpeculationExtension:
    """Adds to every vLLM worker what drafts need."""

    vllm_config: Any
    model_runner: Any

    def troupe_speculate(self) -> None:
        """Makes the runner sample drafts by `CoupledSampler`; called once, before the first request."""
        from vllm.utils.torch_utils import PIN_MEMORY
        from vllm.v1.sample.logits_processor import build_logitsprocs

        from serve_apps.policy.coupled_sampler import CoupledSampler
        from serve_apps.policy.padded_rows import PaddedRows

        runner = self.model_runner
        runner.drafter.attach(runner)
        runner.rejection_sampler = CoupledSampler(runner.sampler)
        # vLLM stops drafting for all sequences as soon as one is near the longest context, and on a CPU dies of it; the drafter looks itself.
        runner.effective_drafter_max_model_len = sys.maxsize
        # With speculation vLLM leaves out what works on rows by request. The first row of each request is sampled as without drafts.
        plain = copy.copy(self.vllm_config)
        object.__setattr__(plain, "speculative_config", None)
        is_padded = num_known_rows(Path(self.vllm_config.model_config.model)) is not None
        runner.input_batch.logitsprocs = build_logitsprocs(
            plain, runner.device, PIN_MEMORY, False, [PaddedRows] if is_padded else []
        )

    def troupe_learn_drafts(self, completions: Sequence[WireCompletion]) -> None:
        """Has the drafter take completions of an earlier engine."""
        self.model_runner.drafter.learn(
            WireCompletion(*one) for one in completions
        )  # plain tuples, where they crossed a process

    def troupe_draft_counts(self) -> dict[str, Any]:
        """Returns {"num_positions", "agents"}, see `Policy.draft_counts`."""
        drafter = self.model_runner.drafter
        return {"num_positions": drafter.num_positions, "agents": drafter.counts()}
