"""The gateway on Ray Serve over real engines: two sets of policy apps, switched while requests come."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
import xgrammar
from safetensors.torch import load_file, save_file
from seen_spans import Collector, Seen, collector, tree_of
from servers import free_port
from transformers import AutoModelForCausalLM
from waits import wait_until

from pipelines.examples.calculator import program as calculator
from serve_apps.chat.tokenizer import load_tokenizer
from serve_apps.config import EpisodeConfig, GatewayConfig, ServeConfig, TelemetryConfig
from serve_apps.episode.team import TeamSpec
from serve_apps.gateway.app import shadows_name
from serve_apps.gateway.routes import RouteError, gateway_apps, gateway_statuses, gateway_teams, route
from serve_apps.gateway.traffic.figures import by_version
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute
from serve_apps.policy.deployment import PolicyAppSpec, ensure_apps
from stores.types import ModelVersionRef, Sampling
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore
from stores.weights.weight_cache import fetch
from tests.serve_apps.controller_death import asked_all_the_time, kill_controller
from tests.serve_apps.deployed_apps import remove_apps, replica_statuses

pytestmark = pytest.mark.nightly

AGENTS = ("solver", "verifier", "refiner", "finalizer")
HELLO: list[Any] = [{"role": "user", "content": "Compute 12 + 3 * 45"}]
ASK: dict[str, Any] = {"model": "demo/solver", "messages": HELLO, "max_tokens": 4}


@dataclass
class Served:
    """A gateway over set blue, which serves version 0, and (fixture `both`) set green, which serves version 1."""

    config: GatewayConfig
    refs: list[ModelVersionRef]
    state_file: Path
    collector: Collector
    """Gets the spans of its requests."""
    apps: dict[str, str] = field(default_factory=lambda: {"blue": "demo-blue-g", "green": "demo-green-g"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.port}"

    def policy_app(self, version: int) -> PolicyAppSpec:
        serve = ServeConfig(kv_cache_gib=0.2, max_num_seqs=64, health_check_period_s=2)
        name = self.apps[("blue", "green")[version]]
        return PolicyAppSpec(name=name, model_group="g", model=self.refs[version], serve=serve)

    def deployed_team(self, version: int, **changes: Any) -> DeployedTeam:
        set_name = ("blue", "green")[version]
        team_spec = TeamSpec(
            workflow="serve_apps.workflows.math_chain:MathChain",
            settings={},
            group_of=dict.fromkeys(AGENTS, "g"),
            tokenizers={"g": self.refs[version]},
            max_model_len={"g": 512},
            sampling=dict.fromkeys(AGENTS, Sampling(max_tokens=24)),
            policy_versions={"g": version},
            team_key=f"key{version}",
            limits=EpisodeConfig(),
        )
        fields = {"team_version": 10 + version, "set_name": set_name, "apps": {"g": self.apps[set_name]}}
        return DeployedTeam(**fields, team_spec=team_spec.to_dict() | changes)

    def route(self, version: int) -> None:
        team_route = TeamRoute(champion=self.deployed_team(version))
        route(self.config, "demo", team_route, state_file=self.state_file, timeout_s=120)

    def num_running(self) -> int:
        """Requests that the engine of set blue plays."""
        return sum(status["num_running"] for status in replica_statuses(self.apps["blue"]))


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("gateway")
    store, refs = WeightStore(str(scratch / "weights")), []
    for version in range(2):
        folder = scratch / f"v{version}"
        shutil.copytree(tiny_model, folder)
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(version)
        tensors = {name: t + 0.05 * version * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        probe = Probe(sequences=((3, 4, 5),), logprobs=((0.0, 0.0),))
        refs.append(
            store.commit(
                folder, model_group="g", version=version, parent=None, run_id="r", iteration=version, probe=probe
            )
        )
    with collector() as running:
        telemetry = TelemetryConfig(endpoint=running.endpoint)
        config = GatewayConfig(port=free_port(), request_timeout_s=60, num_replicas=2, telemetry=telemetry)
        served = Served(config, refs, scratch / "apps.json", running)
        ensure_apps([served.policy_app(0)], state_file=served.state_file, timeout_s=240)
        served.route(0)
        yield served
        served.route(0)
        last = httpx.post(f"{served.url}/v1/chat/completions", json=ASK, timeout=60).json()["id"]
        remove_apps([*served.apps.values(), *gateway_apps(served.config)])
        assert last in {span.attributes.get("gen_ai.response.id") for span in running.spans}, (
            "sent at the replica's end"
        )


@pytest.fixture(scope="module")
def both(served: Served) -> Served:
    """With set green, an engine more."""
    ensure_apps([served.policy_app(version) for version in range(2)], state_file=served.state_file, timeout_s=240)
    return served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    served.route(0)
    with openai.OpenAI(api_key="none", base_url=f"{served.url}/v1", max_retries=0) as client:
        yield client


@pytest.mark.test
def test_a_chat_on_a_real_engine_is_the_same_whole_and_streamed(served: Served, client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "demo/solver", "messages": HELLO, "seed": 7, "max_tokens": 40}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    (choice,) = whole.choices
    assert whole.model_extra and whole.model_extra["troupe"]["sampled_by"] == [0]
    assert choice.logprobs and choice.logprobs.content and choice.message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in choice.logprobs.content)
    chunks = list(client.chat.completions.create(**ask, stream=True, logprobs=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    logprobs = [token.logprob for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content or ()]
    assert logprobs == pytest.approx([token.logprob for token in choice.logprobs.content], abs=1e-4)
    assert len(chunks) > 5, "piece by piece"
    greedy = client.chat.completions.create(**ask | {"temperature": 0}, logprobs=True, top_logprobs=1)
    assert greedy.choices[0].logprobs
    tokens = greedy.choices[0].logprobs.content or []
    assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens), "the likeliest each time"


VALUE = {
    "type": "object",
    "properties": {"value": {"type": "boolean"}},
    "required": ["value"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": VALUE}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_knows_of_no_call_makes_the_one_that_is_forced(
    served: Served, client: openai.OpenAI, stream: bool
) -> None:
    ask: dict[str, Any] = {"model": "demo/group/g", "messages": HELLO, "seed": 7, "max_tokens": 300}
    one = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**ask, **one, stream=stream)
    if stream:
        (call,) = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
    else:
        (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["value"] in (True, False)


@pytest.mark.test
def test_logprobs_under_a_constraint_are_those_of_what_it_allows(served: Served, client: openai.OpenAI) -> None:
    folder = fetch(served.refs[0])
    tokenizer = load_tokenizer(str(folder)).hugging_face
    compiled = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer)).compile_grammar(
        'root ::= "yes" | "no"'
    )
    more = {"structured_outputs": {"choice": ["yes", "no"]}, "return_token_ids": True}
    answer = client.chat.completions.create(
        model="demo/group/g", messages=HELLO, seed=3, max_tokens=20, logprobs=True, extra_body=more
    )
    choice = answer.choices[0]
    assert choice.message.content in ("yes", "no") and choice.logprobs and answer.model_extra and choice.model_extra
    prompt, sampled = answer.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([prompt + sampled])).logits[0].float()
    matcher, mask = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, logits.shape[-1])
    gaps, free_gaps = [], []
    for position, (token, said) in enumerate(zip(sampled, choice.logprobs.content or (), strict=True), len(prompt) - 1):
        matcher.fill_next_token_bitmask(mask)
        allowed = logits[position : position + 1].clone()
        xgrammar.apply_token_bitmask_inplace(allowed, mask)
        gaps.append(abs(float(allowed.log_softmax(-1)[0, token]) - said.logprob))
        free_gaps.append(abs(float(logits[position].log_softmax(-1)[token]) - said.logprob))
        assert matcher.accept_token(token)
    assert max(gaps) < 1e-3 and max(free_gaps) > 0.5, "without the constraint they would be others"


@pytest.mark.test
def test_what_the_engine_refuses_is_the_callers_fault_and_no_failure_of_the_team(
    served: Served, client: openai.OpenAI
) -> None:
    ask: dict[str, Any] = {"model": "demo/group/g", "messages": HELLO, "max_tokens": 20}
    before = num_failures(served)
    for more in (
        {"min_tokens": 50},
        {"logit_bias": {"99999999": 1}},
        {"allowed_token_ids": [99_999_999]},
        {"structured_outputs": {"regex": "(("}},
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 3}}},
        {"structured_outputs": {"json": {"type": "string", "pattern": "(a|b|c){500}"}}},
        {"structured_outputs": {"json": {"$ref": "#"}}},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**ask, extra_body=more)
    form = {"structured_outputs": {"choice": ["yes"]}}
    assert client.chat.completions.create(**ask, extra_body=form).choices[0].message.content == "yes", "it goes on"
    assert num_failures(served) == before


def num_failures(served: Served) -> float:
    figures = [row for status in gateway_statuses(served.config) for row in status["figures"]]
    return sum(row["sums"]["failure_share"][1] for row in figures)


def test_a_client_that_disconnects_frees_its_slot_and_the_engine(served: Served, client: openai.OpenAI) -> None:
    ask = {"model": "demo/group/g", "messages": HELLO, "max_tokens": 450, "temperature": 1.5, "stream": True, "n": 8}
    began = time.monotonic()
    assert httpx.post(f"{served.url}/v1/chat/completions", json=ask | {"stream": False}, timeout=120).status_code == 200
    whole_s = time.monotonic() - began
    for streams in (True, False):
        began = time.monotonic()
        body = ask | {"stream": streams}
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.Client(timeout=0.3) as http,
            http.stream("POST", f"{served.url}/v1/chat/completions", json=body) as answer,
        ):
            for _ in answer.iter_raw():
                if time.monotonic() > began + 0.3:
                    raise httpx.ReadTimeout("enough")
        while served.num_running():
            assert time.monotonic() < began + 120, "the engine goes on with what nobody reads"
            time.sleep(0.02)
        assert time.monotonic() < began + 0.7 * whole_s, "it was free no sooner than by playing the answer to its end"
        assert all(status["in_flight"] == [] for status in gateway_statuses(served.config))


@pytest.mark.test
def test_a_whole_workflow_answers_and_streams_its_turns(served: Served, client: openai.OpenAI) -> None:
    answer = httpx.post(f"{served.url}/v1/workflows/demo/runs", json={"prompt": "1+1", "seed": 3}, timeout=60)
    assert answer.status_code == 200, answer.text
    run = answer.json()
    assert run["troupe"]["team_version"] == 10 and [t["agent"] for t in run["turns"]] == list(AGENTS)
    assert {t["policy_version"] for t in run["turns"]} == {0} and run["usage"]["completion_tokens"] > 0
    body = {"prompt": "1+1", "seed": 3, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/workflows/demo/runs", json=body, timeout=60) as stream:
        events = [
            httpx.Response(200, content=line[6:]).json() for line in stream.iter_lines() if line.startswith("data:")
        ]
    assert [e["event"] for e in events] == ["start", *["turn"] * 4, "result"]
    assert [e["text"] for e in events[1:-1]] == [t["text"] for t in events[-1]["turns"]]


def test_twenty_switches_under_load_fail_no_request_and_mix_no_teams(both: Served, client: openai.OpenAI) -> None:
    answers: list[dict[str, Any]] = []
    faults: list[str] = []
    is_over = threading.Event()

    def keep_asking(number: int) -> None:
        body = {"model": "demo/solver", "messages": HELLO, "max_tokens": 24, "stream": bool(number % 2), "n": 2}
        with httpx.Client(timeout=60) as http:
            while not is_over.is_set():
                answer = http.post(f"{both.url}/v1/chat/completions", json=body)
                if answer.status_code != 200:
                    faults.append(answer.text)
                lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                bodies = [httpx.Response(200, content=line).json() for line in lines] or [answer.json()]
                for troupe in (f["troupe"] for f in bodies if "troupe" in f):
                    answers.append(troupe)

    threads = [threading.Thread(target=keep_asking, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for i in range(20):
        version = (i + 1) % 2
        both.route(version)
        for status in gateway_statuses(both.config):  # each replica by itself
            answer = httpx.post(f"{status['address']}/v1/chat/completions", json=ASK, timeout=60)
            assert answer.headers["x-troupe-team"] == f"demo@{10 + version}", "after `route` every replica follows"
    is_over.set()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    assert {a["team_version"] for a in answers} == {10, 11} and len(answers) > 20
    mixed = [a for a in answers if a["sampled_by"] != [a["team_version"] - 10]]
    assert not mixed, mixed[:3]


def test_a_team_that_cannot_be_loaded_is_refused_and_the_deployed_one_stays(both: Served, client: Any) -> None:
    bad = TeamRoute(champion=both.deployed_team(1, workflow="nowhere:Nothing"))
    with pytest.raises(RouteError, match=r"refuses: workflow\.path: cannot import 'nowhere'"):
        route(both.config, "demo", bad, state_file=both.state_file, timeout_s=60)
    assert gateway_teams(both.config)["demo"].champion.team_version == 10
    assert client.chat.completions.create(model="demo/solver", messages=HELLO).system_fingerprint == "demo@10"


def test_two_teams_share_a_gateway_and_one_can_be_removed(both: Served, client: openai.OpenAI) -> None:
    route(both.config, "other", TeamRoute(champion=both.deployed_team(1)), state_file=both.state_file, timeout_s=60)
    versions = {
        client.chat.completions.create(model=f"{team}/solver", messages=HELLO).system_fingerprint
        for team in ("demo", "other")
    }
    assert versions == {"demo@10", "other@11"}
    route(both.config, "other", None, state_file=both.state_file, timeout_s=60)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other/solver", messages=HELLO)


def test_every_replica_reports_the_figures_of_all_replicas(served: Served, client: openai.OpenAI) -> None:
    addresses = [status["address"] for status in gateway_statuses(served.config)]

    def num_answers(address: str) -> int:
        status = httpx.get(f"{address}/v1/admin/status", timeout=10).json()
        assert len(status["replicas"]) == 2
        (team,) = status["teams"]
        return int(team["deployed"][0]["figures"].get("failure_share", {"num": 0})["num"])

    before = num_answers(addresses[0])
    for address, num in zip(addresses, (1, 2), strict=True):
        for _ in range(num):
            assert httpx.post(f"{address}/v1/chat/completions", json=ASK, timeout=60).status_code == 200
    assert [num_answers(address) for address in (*addresses, served.url)] == [before + 3] * 3


@pytest.mark.test
def test_an_unchanged_program_runs_its_episode_through_any_replica(served: Served) -> None:
    served.route(0)
    addresses = [status["address"] for status in gateway_statuses(served.config)]
    episode = httpx.post(f"{addresses[0]}/v1/episodes", json={"team": "demo", "prompt": "7+6*8"}, timeout=10).json()

    async def play(address: str) -> str:
        async with openai.AsyncOpenAI(
            api_key="none", base_url=f"{address}{episode['agents']['solver']}", max_retries=0
        ) as c:
            return await calculator.answer("7+6*8", c)

    answers = [asyncio.run(play(address)) for address in (addresses[1], addresses[0], served.url)]
    with openai.OpenAI(api_key="none", base_url=f"{addresses[1]}{episode['base_url']}", max_retries=0) as other:
        chunks = list(other.chat.completions.create(model="verifier", messages=HELLO, stream=True))
        assert {chunk.system_fingerprint for chunk in chunks} == {"demo@10"} and chunks[-1].choices[0].finish_reason
        with pytest.raises(openai.NotFoundError, match="agents are solver"):
            other.chat.completions.create(model="nobody", messages=HELLO)
    assert len(answers) == 3
    unknown = episode["base_url"].replace(episode["id"].split("-")[1], "0badcafe")
    assert httpx.get(f"{addresses[1]}{unknown}/models", timeout=10).status_code == 404
    ended = httpx.post(f"{addresses[1]}{episode['base_url']}/outcome", json={"score": 1}, timeout=10).json()
    assert ended["num_turns"] >= 4 and ended["troupe"]["team_version"] == 10, ended
    late = httpx.post(f"{addresses[1]}{episode['base_url']}/outcome", json={"score": 1}, timeout=10)
    assert late.status_code == 410 and late.headers["content-type"] == "application/json"


def test_a_collector_gets_the_spans_of_requests_in_the_trace_of_their_caller(served: Served) -> None:
    trace_id = os.urandom(16).hex()
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    first, second = (status["address"] for status in gateway_statuses(served.config))
    with httpx.Client(headers=headers, timeout=60) as http:
        chat = http.post(f"{first}/v1/chat/completions", json=ASK).json()
        run = http.post(f"{first}/v1/workflows/demo/runs", json={"prompt": "12 + 3"}).json()
        episode = http.post(f"{first}/v1/episodes", json={"team": "demo", "prompt": "7+6*8"}).json()
        by_other = http.post(f"{second}{episode['agents']['solver']}/chat/completions", json=ASK).json()
        http.post(f"{second}{episode['base_url']}/outcome", json={"score": 1})
    answers = {chat["id"], run["id"], episode["id"], by_other["id"]}

    def spans() -> list[Seen]:
        return [span for span in [*served.collector.spans] if span.trace_id == trace_id]

    wait_until(
        lambda: answers <= {span.attributes.get("gen_ai.response.id") for span in spans()} and len(spans()) >= 18
    )
    assert {span.service for span in spans()} == {"troupe-gateway"}
    tree = dict(branch for branch in tree_of(spans(), "00f067aa0ba902b7") if not isinstance(branch, str))
    assert tree.pop("POST /v1/chat/completions") == ["chat demo/solver"]
    ((name, turns),) = tree.pop("POST /v1/workflows/{team}/runs")
    assert name == "invoke_workflow demo" and len(turns) == len(run["turns"])
    assert turns == [(f"invoke_agent {turn['agent']}", ["chat g"]) for turn in run["turns"]]
    assert tree.pop("POST /v1/episodes") == ["invoke_workflow demo"]
    call = "POST /v1/episodes/{episode_id}/agents/{agent}/chat/completions"
    assert tree.pop(call) == [(call, ["chat g"])], "the other replica forwards the call, and its trace"
    (asked,) = [span for span in spans() if span.attributes.get("gen_ai.response.id") == chat["id"]]
    assert asked.attributes["gen_ai.usage.output_tokens"] == chat["usage"]["completion_tokens"]
    assert asked.attributes["gen_ai.usage.input_tokens"] == chat["usage"]["prompt_tokens"]
    assert asked.attributes["gen_ai.response.finish_reasons"] == [chat["choices"][0]["finish_reason"]]
    assert "12 + 3" not in repr(served.collector.spans)


def test_a_killed_replica_comes_back_with_its_teams_and_retrying_callers_see_no_error(served: Served) -> None:
    served.route(0)
    before = gateway_statuses(served.config)
    is_over, answered = threading.Event(), list[str]()
    episode = httpx.post(f"{before[0]['address']}/v1/episodes", json={"team": "demo"}, timeout=10).json()
    models_url = f"{before[1]['address']}{episode['base_url']}/models"
    assert httpx.get(models_url, timeout=10).status_code == 200

    def keep_asking() -> None:
        while not is_over.is_set():  # each time over a connection of its own, which the kernel deals anew
            with openai.OpenAI(api_key="none", base_url=f"{served.url}/v1", max_retries=3) as client:
                answer = client.chat.completions.create(model="demo/solver", messages=HELLO, max_tokens=24)
                answered.append(str(answer.system_fingerprint))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(4)]
        os.kill(before[0]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 90
        pids = {status["pid"] for status in before}
        while len(now := gateway_statuses(served.config)) < 2 or before[0]["pid"] in {s["pid"] for s in now}:
            assert time.monotonic() < deadline, "no other replica came up"
            time.sleep(0.2)
        is_over.set()
        for future in asking:
            future.result()
    assert set(answered) == {"demo@10"} and len({s["pid"] for s in now} - pids) == 1
    codes = [httpx.get(models_url, timeout=10).json()["error"]["code"] for _ in range(2)]
    assert codes == ["replica_gone", "episode_not_found"], "its episodes went with it"
    (new,) = [s for s in now if s["pid"] not in pids]
    answer = httpx.post(f"{new['address']}/v1/chat/completions", json=ASK, timeout=60)
    assert answer.headers["x-troupe-team"] == "demo@10"


def test_two_deaths_of_the_serve_controller_end_no_engine_and_fail_no_answer(both: Served) -> None:
    def pids() -> set[int]:
        engines = {status["pid"] for app in both.apps.values() for status in replica_statuses(app)}
        return engines | {status["pid"] for status in gateway_statuses(both.config)}

    both.route(0)
    before = pids()
    requests = [(f"{both.url}/v1/chat/completions", ASK), (f"{both.url}/v1/workflows/demo/runs", {"prompt": "6*7"})]
    for version in (1, 0):
        with asked_all_the_time(requests * 2) as seen:
            seen.wait_for_more()
            kill_controller()
            seen.wait_for_more()
        print(f"death of the Serve controller: {seen}; engines and gateways started anew: {sorted(pids() - before)}")
        assert not seen.failed and pids() == before
        both.route(version)
        answer = httpx.post(f"{both.url}/v1/chat/completions", json=ASK, timeout=60)
        assert answer.headers["x-troupe-team"] == f"demo@{10 + version}"


def test_callers_of_a_set_whose_engines_are_gone_are_told_when_to_ask_again(served: Served) -> None:
    served.route(0)
    (engine,) = replica_statuses(served.apps["blue"])
    os.kill(engine["pid"], signal.SIGKILL)
    for path, body in (("chat/completions", ASK), ("workflows/demo/runs", {"prompt": "6*7"})):
        told = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60)
        while "no replica of app" not in told.text:  # until Serve sees that it is gone, calls fail with it
            assert told.status_code == 503 and told.headers["retry-after"], told.text
            told = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60)
        assert told.status_code == 503 and told.headers["retry-after"], told.text
    wait_until(
        lambda: httpx.post(f"{served.url}/v1/chat/completions", json=ASK, timeout=60).status_code == 200, timeout_s=120
    )


def test_shadow_requests_are_answered_in_a_separate_process_at_low_priority(both: Served) -> None:
    team_route = TeamRoute(champion=both.deployed_team(0), candidate=both.deployed_team(1), shadow=1.0)
    route(both.config, "demo", team_route, state_file=both.state_file, timeout_s=120)
    try:
        for path, body in (("chat/completions", ASK), ("workflows/demo/runs", {"prompt": "6*7"})):
            before = num_answered(both, 11)
            deadline = time.monotonic() + 120
            while num_answered(both, 11) == before:  # what comes before the player is up is dropped
                assert time.monotonic() < deadline, "no shadow was played"
                answer = httpx.post(f"{both.url}/v1/{path}", json=body, timeout=60)
                assert answer.headers["x-troupe-team"] == "demo@10"
                time.sleep(0.5)
        title = f"ray::ServeReplica:{shadows_name(both.config)}:"
        processes = psutil.process_iter(["pid", "cmdline"])
        players = [p.info["pid"] for p in processes if " ".join(p.info["cmdline"] or []).startswith(title)]
        assert players and {os.sched_getscheduler(pid) for pid in players} == {os.SCHED_IDLE}
    finally:
        both.route(0)


def num_answered(served: Served, team_version: int) -> float:
    """The number of answers of a team version, on all replicas."""
    sums = by_version("demo", gateway_statuses(served.config))
    return sums[team_version]["failure_share"][0] if team_version in sums else 0


def test_a_port_that_is_taken_is_reported(served: Served) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = GatewayConfig(port=taken.getsockname()[1])
        try:
            with pytest.raises(RouteError, match=r"did not start: .*cannot be listened on: .*take another port"):
                route(
                    config,
                    "demo",
                    TeamRoute(champion=served.deployed_team(0)),
                    state_file=served.state_file,
                    timeout_s=120,
                )
        finally:
            remove_apps(gateway_apps(config))
