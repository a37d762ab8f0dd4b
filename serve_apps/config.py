"""Settings of serving: how a policy app runs and how it is called. Pydantic only."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Settings(BaseModel):
    """Frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServeConfig(Settings):
    """One policy app: a vLLM engine per replica."""

    num_replicas: int = Field(1, ge=1)
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    max_model_len: int = Field(512, ge=16)
    """Prompt and completion together, tokens."""
    max_num_seqs: int = Field(256, ge=1)
    threads: int = Field(1, ge=1)
    """CPU threads of one engine (CPU only)."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """CPU only; on a GPU set `engine.gpu_memory_utilization`."""
    tensor_parallel_size: int = Field(1, ge=1)
    cpus: float = Field(0.1, ge=0)
    """What Ray reserves per replica."""
    gpus: float = Field(0.0, ge=0)
    enable_prefix_caching: bool = True
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further `AsyncEngineArgs`, passed on as they are."""
    start_timeout_s: float = Field(300, gt=0)
    health_check_period_s: float = Field(5, gt=0)
    drain_timeout_s: float = Field(30, gt=0)
    """How long a replica that is told to stop may finish what it has begun."""


class CallConfig(Settings):
    """How model calls reach a policy app. Deadlines nest: call < turn < episode < stage."""

    call_timeout_s: float = Field(60, gt=0)
    max_attempts: int = Field(4, ge=1)
    """A call that failed for infrastructure reasons is repeated with the same seed, after 0.5, 2, 8 ... seconds."""
    batch_max: int = Field(64, ge=1)
    """Requests coalesced into one Serve call."""
    batch_wait_s: float = Field(0.003, ge=0)
    """How long a request waits for company."""


class EpisodeConfig(Settings):
    """Limits of one episode."""

    turn_timeout_s: float = Field(270, gt=0)
    episode_timeout_s: float = Field(600, gt=0)
    max_attempts: int = Field(2, ge=1)
    """An infrastructure failure is an attempt, retried with the same seed; only the last is stored."""


class CaptureConfig(Settings):
    """Which answers to people are kept, to be looked at, judged and trained on: `storage.served`."""

    consent: Literal["asked", "given"] = "asked"
    """`asked`: only requests that say `store: true` are kept. `given`: callers have agreed, and all are but those that say
    `store: false`."""
    share: float = Field(0.0, ge=0, le=1)
    """Of the requests that may be kept. 0: none."""
    redact: dict[str, str] = Field(default_factory=dict)
    """Regular expression -> what stands in its place, in every text before it is stored. An episode that had such text loses
    its token ids, which would say it still, and can be looked at and judged but not trained on."""
    keep_days: float = Field(30, gt=0)
    """Then an episode and what was said of it are removed from the disk."""
    flush_s: float = Field(0.5, gt=0)
    """Between two writes."""
    max_pending: int = Field(1000, ge=1)
    """Episodes that wait to be written; what comes beyond them is left out."""

    @field_validator("redact")
    @classmethod
    def _is_a_pattern(cls, value: dict[str, str]) -> dict[str, str]:
        for pattern, replacement in value.items():
            try:
                re.compile(pattern).sub(replacement, "")
            except re.error as error:
                raise ValueError(f"{pattern!r} -> {replacement!r} is no regular expression: {error}") from None
        return value


class GatewayEpisodesConfig(Settings):
    """Episodes that callers' programs play: `POST /v1/episodes`."""

    max_open: int = Field(256, ge=1)
    """Per replica; who asks for one more gets 429."""
    max_turns: int = Field(64, ge=1)
    """Of one episode; a call beyond them gets 400, and the episode counts as truncated."""
    idle_s: float = Field(600, gt=0)
    """Without a call or an outcome for so long an episode ends with status `timeout`."""
    max_s: float = Field(3600, gt=0)
    """The same for an episode as a whole."""


class GatewayConfig(Settings):
    """What answers people's requests with promoted teams."""

    host: str = "127.0.0.1"
    """Where it listens. Beyond this machine only with `keys_file`."""
    port: int = Field(8000, ge=1, le=65535)
    num_replicas: int = Field(1, ge=1)
    """All of a machine listen on the one port; the kernel deals connections to them."""
    cpus: float = Field(0.1, ge=0)
    """What Ray reserves per replica."""
    keys_file: str = ""
    """API keys, as `troupe key` writes them; empty: everybody who reaches the port may do everything."""
    max_in_flight: int = Field(64, ge=1)
    """Requests answered at once, per replica."""
    max_queued: int = Field(64, ge=0)
    """Requests that wait for a place; what comes beyond them gets 429."""
    queue_timeout_s: float = Field(10, gt=0)
    """How long one waits; then 503."""
    request_timeout_s: float = Field(300, gt=0)
    """Then 504."""
    max_shadows: int = Field(64, ge=1)
    """Shadow requests on their way at once, per replica; what comes beyond them is left out, as it is while requests wait."""
    max_body_bytes: int = Field(2_000_000, ge=1)
    capture: CaptureConfig = CaptureConfig()
    episodes: GatewayEpisodesConfig = GatewayEpisodesConfig()
    call: CallConfig = CallConfig()
    """How the model calls of whole workflows reach the policy apps."""

    @model_validator(mode="after")
    def _others_need_a_key(self) -> Self:
        if self.host not in ("127.0.0.1", "::1", "localhost") and not self.keys_file:
            raise ValueError(
                f"gateway.host = {self.host!r} is reached from other machines, and there is no gateway.keys_file: make one "
                "with `troupe key`, or listen on 127.0.0.1"
            )
        return self


class SandboxConfig(Settings):
    """How code that a model wrote is run."""

    wall: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """What stands between the code and this machine; auto: the strongest that works here, and never `none`."""
    time_s: float = Field(2.0, gt=0)
    """Per case, by the clock."""
    max_time_s: float = Field(10.0, gt=0)
    """What a task's own statement may ask for per case."""
    memory_mib: int = Field(512, ge=64)
    """Per process; all processes of a case together, too, looked at ten times a second."""
    processes: int = Field(8, ge=1)
    """Processes and threads of a case."""
    output_kib: int = Field(256, ge=1)
    """Standard output, error and result of a case together."""
    scratch_mib: int = Field(16, ge=1)
    """Files of a program in all."""
    open_files: int = Field(64, ge=16)
    python: str = ""
    """Interpreter; default this one, or the system's where the sandbox's user cannot read this one."""
