"""Settings of serving: how a policy app runs and how it is called. Pydantic only."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_apps.authoring.parsers import Parsers
from stores.extensions import extensions
from stores.settings import IDENTITY_IF_CHANGED, NOT_IDENTITY, Settings

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Numbers per attention head that vLLM's attention takes on a CPU; with others its engine dies at the first request."""


class ServeConfig(Settings):
    """This section sets how the policy app of a model group runs: an engine per replica."""

    engine_kind: str = Field("vllm", json_schema_extra=IDENTITY_IF_CHANGED)
    """What samples: `vllm`; `transformers`, which is slow, samples one sequence at a time and needs no vLLM; or an engine of your
    own as `package.module:Class`, a subclass of `serve_apps.engines.port.Engine` that every Ray node can import."""
    num_replicas: int = Field(1, ge=1, json_schema_extra=NOT_IDENTITY)
    """The number of engines that serve the same weights. Raise it for more episodes at once."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """The number format of weights and activations in the engine; `auto` takes that of the files of version 0. Use
    `bfloat16` for models of real size."""
    max_model_len: int = Field(512, ge=16)
    """The longest context in tokens, prompt and completion together. It is at most what the model was built for."""
    max_num_seqs: int = Field(256, ge=1)
    """The number of sequences that an engine samples at once, at most. Lower it where the KV cache is small."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field("auto", json_schema_extra=NOT_IDENTITY)
    """The number of CPU threads of one engine. `auto`: the cores that the process which starts the engines may use
    (affinity, cgroup, OMP_NUM_THREADS), divided by the number of engines; a small model gets fewer. It has no effect on a
    GPU."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """The size of the KV cache in GiB, on a CPU only. On a GPU set `engine.gpu_memory_utilization`."""
    tensor_parallel_size: int = Field(1, ge=1)
    """The number of GPUs over which vLLM splits one engine."""
    cpus: float = Field(0.1, ge=0, json_schema_extra=NOT_IDENTITY)
    """The number of CPUs that Ray reserves per replica. It limits where Ray places replicas, not what they use."""
    gpus: float = Field(0.0, ge=0, json_schema_extra=NOT_IDENTITY)
    """The number of GPUs that Ray reserves per replica; 0: the engine runs on the CPU."""
    block_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field("auto", json_schema_extra=IDENTITY_IF_CHANGED)
    """The number of tokens per block of the KV cache. Only full blocks are cached, so a prompt that is shorter than one is
    computed again for each episode. `auto`: 32 on a CPU, the smallest that vLLM's attention takes there, and on a GPU what
    vLLM takes by itself."""
    tool_parser: str = Field("auto", json_schema_extra=IDENTITY_IF_CHANGED)
    """What reads the calls of tools in a completion: the name of a tool parser of vLLM, or `auto`: the one that the chat template
    shows. With other parsers than `hermes`, `qwen3_coder`, `llama3_json` and `mistral`, an answer to a chat with tools is streamed when it
    is complete."""
    reasoning_parser: str = Field("auto", json_schema_extra=IDENTITY_IF_CHANGED)
    """What tells thoughts from what is said in a completion: the name of a reasoning parser of vLLM, `auto`: the marks of the
    chat template, such as `<think>`, or `none`: thoughts are left in the text. It is about answers to chats, and changes neither what
    is sampled nor what workflows and judges read."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, passed on as they are; an engine of your own may read them as it likes."""
    start_timeout_s: float = Field(300, gt=0, json_schema_extra=NOT_IDENTITY)
    """The time in seconds within which an engine must have started. Raise it for large models and slow disks."""
    health_check_period_s: float = Field(5, gt=0)
    """The time in seconds between two health checks of a replica by Ray Serve."""

    @property
    def num_seqs(self) -> int:
        """Returns the number of sequences that all replicas together sample at once, at most."""
        return self.num_replicas * int(self.engine.get("max_num_seqs", self.max_num_seqs))

    @property
    def parsers(self) -> Parsers:
        """Returns what reads the completions."""
        return Parsers(tool=self.tool_parser, reasoning=self.reasoning_parser)

    @model_validator(mode="before")
    @classmethod
    def _guesses_no_tokens(cls, data: Any) -> Any:
        if isinstance(data, dict) and "speculation" in data:
            raise ValueError(
                "serve.speculation is no more: it rarely paid; drop it, or have vLLM guess: engine: {speculative_config: {method: suffix}}"
            )
        return data

    @model_validator(mode="after")
    def _settings_are_of_the_engine(self) -> Self:
        foreign = [
            name
            for name in OF_VLLM
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        ]
        if self.engine_kind == "transformers" and foreign:
            raise ValueError(f"serve.{foreign[0]} is a setting of vLLM's engine: drop it, or take engine_kind: vllm")
        return self

    @model_validator(mode="after")
    def _block_size_fits(self) -> Self:
        if self.block_size != "auto" and self.gpus == 0 and self.block_size % 32:
            raise ValueError(f"serve.block_size = {self.block_size}: take a multiple of 32 on a CPU, or `auto`")
        return self

    @field_validator("engine")
    @classmethod
    def _runs_no_code_of_a_model(cls, engine: dict[str, Any]) -> dict[str, Any]:
        if engine.get("trust_remote_code"):
            raise ValueError(
                "engine.trust_remote_code would run code out of the model folder, which is never done here: remove it, and take a "
                "model that vLLM knows itself"
            )
        for name in OF_CONSTRAINTS & engine.keys():
            raise ValueError(
                f"engine.{name} would change which tokens a constraint allows, and the trainer would make other masks than the engine: "
                "remove it"
            )
        return engine


OF_VLLM = ("tensor_parallel_size", "block_size", "engine")
"""Settings that mean nothing to the engine of transformers."""
OF_CONSTRAINTS = frozenset({"structured_outputs_config", "reasoning_parser", "tokenizer_mode"})
"""Settings of the engine that the masks of constrained turns depend on."""


SHORTEST_SILENCE_S = 10.0
"""The least `call_timeout_s`: a replica says only every three seconds that its engine samples."""


class CallConfig(Settings):
    """This section sets how model calls reach a policy app. Timeouts nest: call < turn < episode < stage."""

    call_timeout_s: float = Field(60, ge=SHORTEST_SILENCE_S)
    """The time in seconds for which nothing may come from an engine. A call is not limited while the engine samples, for
    whichever call that is; when for so long no token came of any, the call is cancelled and repeated. Raise it where a
    single step of the engine takes longer: many long prompts on a slow processor."""
    max_attempts: int = Field(4, ge=1)
    """The number of attempts of one call. A call that failed for infrastructure reasons is repeated with the same seed,
    after 0.5, 2, 8 and then always 30 seconds."""
    batch_max: int = Field(64, ge=1)
    """The number of requests that are sent in one Ray Serve call, at most."""
    batch_wait_s: float = Field(0.003, ge=0)
    """The time in seconds that a request waits for others to be sent with."""


class EpisodeConfig(Settings):
    """This section limits one episode. Time in which a model call waits for an engine to begin on it does not count: it says
    how much else there is to do. Such a wait is bounded by `call.call_timeout_s`, and by the deadline of the stage."""

    turn_timeout_s: float = Field(270, gt=0)
    """The time in seconds within which one turn must end, all attempts of its call included, without the time in which the
    call waits."""
    episode_timeout_s: float = Field(600, gt=0)
    """The time in seconds within which an episode must end, without the time in which its calls wait. An episode that takes
    longer has status `timeout`."""
    max_attempts: int = Field(2, ge=1)
    """The number of attempts of one episode. Only an infrastructure failure is repeated, with the same seed, and only the
    last attempt is stored."""


try:
    import regex
except (
    ModuleNotFoundError
):  # with the dependencies of the core alone: where patterns are applied, they are checked as well
    regex = None  # type: ignore[assignment]

ESCAPED = re.compile(r"\\[pPN]\{[^}]*\}|\\.", re.DOTALL)
FUZZY = re.compile(r"\{[^{}idse]*+[idse][^{}]*+\}")
"""What the package `regex` may take for a number of errors that are let pass, and `re` for text."""


class CaptureConfig(Settings):
    """This section sets which of the gateway's answers are stored in `storage.served`, to be inspected, rated and
    trained on."""

    consent: Literal["asked", "given"] = "asked"
    """Whose requests may be stored. `asked`: only those that set `store: true`. `given`: the callers have agreed, and all
    requests may be stored but those that set `store: false`."""
    share: float = Field(0.0, ge=0, le=1)
    """The share of the requests that may be stored which is stored. 0: none."""
    redact: dict[str, str] = Field(default_factory=dict)
    """A mapping from a regular expression of the package `regex` to its replacement, applied to every text before it is stored.
    Braces that would match approximately, such as `{e<=1}`, are refused; write `\\{` for a brace. An episode in which
    a text was replaced loses its token ids, which would still hold the text; it can be inspected and rated but not trained
    on."""
    keep_days: float = Field(30, gt=0)
    """The number of days after which a stored episode and its feedback are removed from the disk."""
    flush_s: float = Field(0.5, gt=0)
    """The time in seconds between two writes to the store."""

    @field_validator("redact")
    @classmethod
    def _is_a_pattern(cls, value: dict[str, str]) -> dict[str, str]:
        for pattern, replacement in value.items():
            if FUZZY.search(ESCAPED.sub("", pattern)):
                raise ValueError(
                    f"{pattern!r}: braces that hold one of the letters i, d, s, e match approximately: write \\{{ for a brace"
                )
            if regex is None:
                continue
            try:
                regex.compile(pattern)
                # This always matches: only then is a replacement looked at.
                regex.compile(f"{pattern}|").sub(replacement, "")
            except (regex.error, IndexError) as error:
                raise ValueError(f"{pattern!r} -> {replacement!r} is no regular expression: {error}") from None
        return value


class GatewayEpisodesConfig(Settings):
    """This section limits the episodes that callers' programs play through `POST /v1/episodes`."""

    max_open: int = Field(256, ge=1)
    """The number of open episodes of the team per gateway replica. A request for another one gets status 429."""
    max_turns: int = Field(64, ge=1)
    """The number of turns of one episode. A further call gets status 400, and the episode counts as truncated."""
    idle_s: float = Field(600, gt=0)
    """The time in seconds without a call or an outcome after which an episode ends with status `timeout`."""
    max_s: float = Field(3600, gt=0)
    """The time in seconds after which an episode ends with status `timeout`, whatever happens in it. Time in which a call waits
    for an engine to begin on it does not count."""


ENVIRONMENT = "environment"
"""The `telemetry.endpoint` that leaves the address of the collector to the variables of OpenTelemetry."""


class TelemetryConfig(Settings):
    """This section sends spans to an OpenTelemetry collector: of requests, model calls, tool calls and whole episodes. They hold
    numbers and names, and no texts unless `texts` is set."""

    endpoint: str = ""
    """The base URL of a collector that takes OTLP over HTTP, such as `http://collector:4318`; spans go to `/v1/traces` below it.
    `environment`: as OTEL_EXPORTER_OTLP_ENDPOINT says. Empty: there are no spans."""
    headers: dict[str, str] = Field(default_factory=dict)
    """The HTTP headers that the collector asks for, each with the name of the environment variable that holds its value, such as
    `{authorization: OTLP_AUTHORIZATION}`. It is read where the spans are made: on the Ray nodes."""
    sample: float = Field(1.0, ge=0, le=1)
    """The share of the traces that begin here which is recorded; a caller that sends `traceparent` has decided it for its own.
    The variable OTEL_TRACES_SAMPLER takes precedence."""
    texts: bool = False
    """Whether spans hold prompts, completions, arguments and results of tools, and messages of errors. Those of requests with
    `store: false` never do."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        if value not in ("", ENVIRONMENT) and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
            raise ValueError(
                f"{value!r} is no base URL of a collector: write it as http://HOST:4318, or `{ENVIRONMENT}`"
            )
        return value

    @field_validator("headers")
    @classmethod
    def _are_named(cls, value: dict[str, str]) -> dict[str, str]:
        for header, variable in value.items():
            if not re.fullmatch("[A-Z_][A-Z0-9_]*", variable):
                raise ValueError(
                    f"{header}: give the name of an environment variable, in capitals, and not the value itself"
                )
        return value


LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that only this machine reaches."""


class GatewayTeamConfig(Settings):
    """What a team takes with it to a port that it shares with others: who may ask it, what is stored of it, its own limits."""

    keys_file: str = ""
    """The path of the file of API keys that `troupe key` writes, which open this team and no other. Empty: everybody who reaches
    the port may do everything with this team."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of the gateway in the `Host` header of requests, besides `host`, 127.0.0.1, ::1 and localhost. Only a team without
    `keys_file` looks at it: otherwise a web page could reach it through a name of its own (DNS rebinding)."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call the team (CORS), such as `https://chat.example.com`. Empty: none."""
    capture: CaptureConfig = CaptureConfig()
    """Which answers are stored, and for how long. By default none is."""
    episodes: GatewayEpisodesConfig = GatewayEpisodesConfig()
    """The limits of episodes that callers' programs play through the gateway."""
    call: CallConfig = CallConfig()
    """How the model calls of whole workflows reach the policy apps."""


class GatewayPortConfig(Settings):
    """What all teams on one port share: where it listens, and what its processes take on."""

    host: str = "127.0.0.1"
    """The address on which the gateway listens. An address that other machines reach needs `keys_file`."""
    port: int = Field(8000, ge=1, le=65535)
    """The TCP port on which the gateway listens. Teams that name the same port share the gateway there, and must agree about its
    settings."""
    num_replicas: int = Field(1, ge=1)
    """The number of gateway replicas. Those of one machine listen on the same port, and the kernel distributes the
    connections among them."""
    cpus: float = Field(0.1, ge=0)
    """The number of CPUs that Ray reserves per gateway replica."""
    receive_timeout_s: float = Field(10, gt=0)
    """The time in seconds within which the head of a request must have come, and after that its body. Then the connection is
    closed, or the request gets status 408."""
    max_connections: int = Field(2048, ge=1)
    """The number of connections that one gateway replica has open, at most, and fewer where it may not open as many files.
    A further one takes the place of the one that has waited longest without a request."""
    max_in_flight: int = Field(64, ge=1)
    """The number of requests that one gateway replica answers at once."""
    key_share: float = Field(0.75, gt=0, le=1)
    """The share of `max_in_flight`, and of `max_queued`, that requests of one API key may take, where several keys may call
    models: streams that one caller does not read shut nobody else out. All callers without a key count as one."""
    max_queued: int = Field(64, ge=0)
    """The number of requests that may wait in one gateway replica. A further request gets status 429."""
    queue_timeout_s: float = Field(10, gt=0)
    """The time in seconds that a request may wait in the queue. Then it gets status 503."""
    request_timeout_s: float = Field(300, gt=0)
    """The time in seconds within which a request must be answered. Then it gets status 504."""
    max_shadows: int = Field(64, ge=1)
    """The number of shadow requests under way per gateway replica. Further ones are dropped, as are all while requests
    wait in the queue."""
    max_body_bytes: int = Field(2_000_000, ge=1)
    """The size in bytes of the body of a request, at most. A larger one is refused."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Where spans of requests go. By default there are none."""
    extensions: tuple[str, ...] = ()
    """The extensions that answer only where they are named here. `messages`: Anthropic's Messages API (`/v1/messages`), whose converters
    are vLLM's: each replica takes 0.7 GB more, and some seconds more to start."""

    @model_validator(mode="before")
    @classmethod
    def _names_its_extensions(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("messages_api"):
            raise ValueError("gateway.messages_api is a name in gateway.extensions now: write extensions: [messages]")
        return (
            {name: value for name, value in data.items() if name != "messages_api"} if isinstance(data, dict) else data
        )

    @field_validator("extensions")
    @classmethod
    def _are_installed(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        installed = [extension.name for extension in extensions() if extension.routes]
        if unknown := [name for name in names if name not in installed]:
            raise ValueError(f"there is no extension {unknown[0]!r} of the gateway; there are {', '.join(installed)}")
        return names


class GatewayConfig(GatewayTeamConfig, GatewayPortConfig):
    """This section sets up the HTTP gateway, which answers requests with promoted teams."""

    @property
    def of_team(self) -> GatewayTeamConfig:
        """The settings that travel with the team's route."""
        return GatewayTeamConfig(**{name: getattr(self, name) for name in GatewayTeamConfig.model_fields})

    @property
    def of_port(self) -> GatewayPortConfig:
        """The settings that all teams on the port share."""
        return GatewayPortConfig(**{name: getattr(self, name) for name in GatewayPortConfig.model_fields})

    @model_validator(mode="after")
    def _others_need_a_key(self) -> Self:
        if self.host not in LOOPBACK and not self.keys_file:
            raise ValueError(
                f"gateway.host = {self.host!r} is reached from other machines, and there is no gateway.keys_file: make one "
                "with `troupe key`, or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _spans_hold_what_may_be_stored(self) -> Self:
        if self.telemetry.texts and self.capture.redact:
            raise ValueError(
                "gateway.telemetry.texts would send texts to the collector that gateway.capture.redact keeps out of the store: set texts "
                "to false, or drop redact"
            )
        return self
