"""transformers_engine: an engine of plain transformers. It is slow, needs no vLLM, and shows what an engine has to do.

One thread computes one sequence at a time, so that what is sampled depends on nothing else that is under way. Prefixes are not
cached. Logits are processed in vLLM's order, and logprobs are those of the distribution that was sampled, as vLLM's
`processed_logprobs`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from serve_apps.chat.tokenizer import TOKENIZER_FILE, stop_token_ids
from serve_apps.config import ServeConfig
from serve_apps.engines.port import REFUSED, UNUSABLE_FORM, AdapterRoom, Engine, Piece
from serve_apps.engines.tensors import Shapes, check_tensors, load_tensors, stored_shapes
from stores.traces.conventions import allowed_tokens
from stores.traces.grammars import Grammars
from stores.types import FinishReason, GenerateRequest, ModelVersionRef
from stores.weights.model_folder import num_known_rows

if TYPE_CHECKING:
    import torch

GREEDY = 1e-5
"""Temperatures below it are 0, as in vLLM."""
NOTHING_LEFT = "the settings of the request leave no token that may come next"
T = TypeVar("T")


class TransformersEngine(Engine):
    """One model of transformers, and the adapters of PEFT on it."""

    def __init__(self, settings: ServeConfig, folder: Path, *, version: int, room: AdapterRoom | None = None) -> None:
        """Loads the model; see `Engine`."""
        self.max_model_len = settings.max_model_len
        self._settings, self._folder, self._version, self._has_adapters = settings, folder, version, room is not None
        self._stop_token_ids = stop_token_ids(folder)
        self._num_known = num_known_rows(folder)
        self._shapes: dict[str, Shapes] = {} if self._has_adapters else {"": stored_shapes(folder)}
        self._adapters: dict[str, tuple[str, int]] = {}
        """By model group, PEFT's name of its adapter, and the version."""
        self._grammars: Grammars | None = None
        self._num_tokens: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self._model = self._loaded(folder)

    @classmethod
    def environment(cls, settings: ServeConfig, *, threads: int) -> dict[str, str]:
        """Returns variables that keep it from the network, and to its threads."""
        return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Yields the completion; see `Engine`."""
        await self._is_awake.wait()
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        is_given_up = threading.Event()

        def tell(piece: Piece | Exception) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def work() -> None:
            try:
                self._sample(request, tell, is_given_up)
            except Exception as error:  # noqa: BLE001  raised again where the caller waits
                tell(error)
            finally:  # once more: it may have been at a token when its caller left
                self._num_tokens.pop(request.request_id, None)

        self._thread.submit(work)
        try:
            piece = Piece()
            while not piece.finish_reason:
                came = await pieces.get()
                if isinstance(came, Exception):
                    raise came
                piece = came
                yield piece
        finally:
            is_given_up.set()
            self._num_tokens.pop(request.request_id, None)

    def progress(self) -> Mapping[str, int]:
        """Returns the tokens of the request under way; see `Engine`."""
        return dict(self._num_tokens)

    async def probe(self, sequences: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[float]]]:
        """Computes one sequence after another; see `Engine`."""
        return await self._in_thread(
            lambda: {group: [self._logprobs(group, ids) for ids in of_group] for group, of_group in sequences.items()}
        )

    async def load(self, ref: ModelVersionRef, folder: Path) -> None:
        """Takes a version of the model, or of a group's adapter where there are adapters; see `Engine`."""
        group = ref.model_group if self._has_adapters else ""
        shapes = self._shapes.get(group) or stored_shapes(folder)
        await asyncio.to_thread(lambda: check_tensors(load_tensors(folder), shapes, str(folder)))
        try:
            await self._in_thread(lambda: self._take(ref, folder))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{folder} does not fit: {error}") from error
        self._shapes[group] = shapes

    async def sleep(self) -> None:
        """Lets requests under way end, and moves the weights to the host's memory."""
        import torch

        self._is_awake.clear()
        await self._in_thread(lambda: self._model.to("cpu"))
        if self._settings.gpus:
            torch.cuda.empty_cache()  # else this process keeps what the weights took

    async def wake(self) -> None:
        """Moves the weights back, and lets requests go on."""
        await self._in_thread(lambda: self._model.to(self._device))
        self._is_awake.set()

    async def free_bytes(self) -> list[int]:
        """Returns what its GPU has free."""
        import torch

        return [int(torch.accelerator.get_memory_info()[0]) if self._settings.gpus else 0]

    async def health(self) -> None:
        """It cannot be gone: it lives in this process."""
        return None

    # -- in the thread ------------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _device(self) -> str:
        return "cuda" if self._settings.gpus else "cpu"

    def _loaded(self, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._settings.dtype, trust_remote_code=False)
        return model.to(self._device).eval()

    def _take(self, ref: ModelVersionRef, folder: Path) -> None:
        if not self._has_adapters:
            self._model, self._version = self._loaded(folder), ref.version
            return
        from peft import PeftModel

        name = f"{ref.model_group}@{ref.version}/{ref.manifest_sha256[:8]}".replace(".", "_")  # of a module
        try:
            if self._adapters:
                self._model.load_adapter(str(folder), adapter_name=name)
            else:
                self._model = PeftModel.from_pretrained(self._model, str(folder), adapter_name=name)
        except Exception:  # PEFT changes the model in place, and leaves half an adapter in it
            if not self._adapters:
                self._model = self._loaded(self._folder)
            elif name in self._model.peft_config:
                self._model.delete_adapter(name)
            raise
        self._model.eval()
        replaced = self._adapters.get(ref.model_group)
        self._adapters[ref.model_group] = name, ref.version
        if replaced is not None and replaced[0] != name:
            self._model.delete_adapter(replaced[0])

    def _route(self, group: str) -> tuple[Any, int]:
        """Switches to the group's adapter; returns what the model is run in, and the version."""
        if group in self._adapters:
            name, version = self._adapters[group]
            self._model.set_adapter(name)
            return nullcontext(), version
        return self._model.disable_adapter() if self._adapters else nullcontext(), self._version

    def _logprobs(self, group: str, token_ids: Sequence[int]) -> list[float]:
        import torch

        route, _ = self._route(group)
        with torch.inference_mode(), route:
            logits = self._model(input_ids=self._ids(token_ids)).logits[0, :-1]
            rows = logits.float().log_softmax(-1)
        return rows.gather(-1, self._ids(token_ids)[0, 1:, None])[:, 0].tolist()  # type: ignore[no-any-return]

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.tensor([list(token_ids)], device=self._device)

    def _sample(self, request: GenerateRequest, tell: Callable[[Piece], None], is_given_up: threading.Event) -> None:
        """Tells the pieces of a completion until it ends or is given up."""
        import torch

        if is_given_up.is_set():
            return
        try:
            sampler = self._sampler(request)
        except (ValueError, RuntimeError) as error:
            tell(Piece(finish_reason=REFUSED, error=str(error)))
            return
        route, version = self._route(request.model_group)
        told = 0
        with torch.inference_mode(), route:
            out = self._model(input_ids=self._ids(request.prompt_token_ids), use_cache=True, logits_to_keep=1)
            while not is_given_up.is_set():
                reason = sampler.sample(out.logits[0, -1])
                self._num_tokens[request.request_id] = len(sampler.token_ids)
                if reason or request.is_streamed:
                    tell(sampler.piece(told, reason, version))
                    told = len(sampler.token_ids)
                if reason:
                    return
                ids = self._ids(sampler.token_ids[-1:])
                out = self._model(input_ids=ids, past_key_values=out.past_key_values, use_cache=True)

    def _sampler(self, request: GenerateRequest) -> _Sampler:
        """Returns what chooses the tokens of a completion; ValueError or RuntimeError where the request cannot be run."""
        num_rows = self._model.config.get_text_config().vocab_size
        constraint, matcher, settings = request.sampling.constraint, None, {**SETTINGS, **request.settings}
        named = (settings[name] for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"))
        for token in chain(request.prompt_token_ids, allowed_tokens(constraint), *named):
            if not 0 <= token < num_rows:
                raise ValueError(f"token id {token} is out of vocabulary, which has {num_rows}")
        if not 0 <= settings["min_tokens"] <= request.sampling.max_tokens >= 1:
            raise ValueError(
                f"min_tokens {settings['min_tokens']}, max_tokens {request.sampling.max_tokens}: take 0 <= min_tokens <= max_tokens, "
                "and at least 1 max_tokens"
            )
        if not request.prompt_token_ids:
            raise ValueError("the prompt is empty: there is nothing to continue")
        if foreign := sorted(request.settings.keys() - SETTINGS.keys()):
            raise ValueError(f"{foreign[0]} is no setting that this engine knows; it knows {', '.join(SETTINGS)}")
        own = () if settings["ignore_eos"] else self._stop_token_ids
        ends = [*(token for token in own if token < num_rows), *settings["stop_token_ids"]]
        if constraint and not allowed_tokens(constraint):
            if not (self._folder / TOKENIZER_FILE).is_file():
                raise ValueError(f"a form needs a tokenizer, and {self._folder} has none")
            self._grammars = self._grammars or Grammars(self._folder)
            try:
                matcher = self._grammars.matcher(constraint, end_ids=ends)
            except (ValueError, RuntimeError):
                raise ValueError(UNUSABLE_FORM) from None
        return _Sampler(request, ends=ends, num_known=self._num_known, matcher=matcher, device=self._device)


SETTINGS: Mapping[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_tokens": 0,
    "stop_token_ids": (),
    "allowed_token_ids": (),
    "ignore_eos": False,
}
"""What of `GenerateRequest.settings` is known, with what it is where nobody says."""


class _Sampler:
    """Chooses the tokens of one completion."""

    def __init__(
        self, request: GenerateRequest, *, ends: Sequence[int], num_known: int | None, matcher: Any, device: str
    ) -> None:
        import torch

        self._request, self._sampling = request, request.sampling
        self._settings = {**SETTINGS, **request.settings}
        self._ends, self._num_known, self._matcher = list(ends), num_known, matcher
        self._choice = allowed_tokens(request.sampling.constraint)
        self._generator = torch.Generator(device).manual_seed(request.seed)
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []
        self._allowed_logprobs: Sequence[float] = ()

    def sample(self, logits: torch.Tensor) -> str:
        """Chooses a token by the logits, [V], of its place; returns the finish reason, empty where more follows.

        REFUSED: nothing is chosen, because the request allows no token here.
        """
        import torch

        logits = self._processed(logits.float().clone())
        if bool(logits.isneginf().all()):
            return REFUSED
        is_greedy = self._sampling.temperature < GREEDY
        if not is_greedy:
            logits = self._filtered(logits / self._sampling.temperature)
        logprobs = logits.log_softmax(-1)
        drawn = logprobs.argmax() if is_greedy else torch.multinomial(logprobs.exp(), 1, generator=self._generator)
        token = int(drawn)
        self._note(token, logprobs)
        if token in self._ends and len(self.token_ids) > self._settings["min_tokens"]:
            return FinishReason.STOP.value
        return FinishReason.LENGTH.value if len(self.token_ids) == self._sampling.max_tokens else ""

    def piece(self, begin: int, finish_reason: str, version: int) -> Piece:
        """Returns what was chosen from token `begin` on."""
        return Piece(
            token_ids=self.token_ids[begin:],
            logprobs=self._logprobs[begin:],
            finish_reason=finish_reason,
            policy_version=version,
            top_logprobs=self._top[begin:],
            allowed_logprobs=self._allowed_logprobs,
            error=NOTHING_LEFT if finish_reason == REFUSED else "",
        )

    def _note(self, token: int, logprobs: torch.Tensor) -> None:
        if self._choice and not self.token_ids:
            self._allowed_logprobs = logprobs[self._choice].tolist()
        self.token_ids.append(token)
        self._logprobs.append(float(logprobs[token]))
        if num := self._request.top_logprobs:
            values, ids = logprobs.topk(num)
            self._top.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
        if self._matcher is not None and not self._matcher.is_terminated():
            self._matcher.accept_token(token)

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits, [V], of what may be sampled at all, after biases and penalties."""
        import torch

        if self._matcher is not None and not self._matcher.is_terminated():
            import xgrammar

            mask = xgrammar.allocate_token_bitmask(1, len(logits))
            self._matcher.fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(logits, mask[0].to(logits.device))
        for only in (self._choice, self._settings["allowed_token_ids"]):
            if only:
                kept = torch.full_like(logits, -torch.inf)
                kept[list(only)] = logits[list(only)]
                logits = kept
        logits[self._num_known :] = -torch.inf if self._num_known is not None else logits[self._num_known :]
        if len(self.token_ids) < self._settings["min_tokens"]:
            logits[self._ends] = -torch.inf
        for token, bias in self._settings["logit_bias"].items():
            logits[token] += bias
        return self._penalized(logits)

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        if (repetition := self._settings["repetition_penalty"]) != 1.0:
            seen = sorted({*self._request.prompt_token_ids, *self.token_ids})
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
        for token, count in Counter(self.token_ids).items():
            logits[token] -= self._settings["frequency_penalty"] * count + self._settings["presence_penalty"]
        return logits

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits, [V], without the tokens that `min_p`, `top_k` and `top_p` leave out, in this order."""
        import torch

        if self._sampling.min_p > 0:
            probabilities = logits.softmax(-1)
            logits[probabilities < self._sampling.min_p * probabilities.max()] = -torch.inf
        if 0 < self._sampling.top_k < len(logits):
            logits[logits < logits.topk(self._sampling.top_k).values[-1]] = -torch.inf
        if self._sampling.top_p < 1:
            ordered, places = logits.sort()
            is_out = ordered.softmax(-1).cumsum(-1) <= 1 - self._sampling.top_p
            is_out[-1] = False
            logits[places[is_out]] = -torch.inf
        return logits
