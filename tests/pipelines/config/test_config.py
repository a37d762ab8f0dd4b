"""Bad run configs: each ends in a ValueError that names the place, the value and the fix."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config.run_config import RunConfig, load_config, parse_config
from pipelines.runners.validate import check
from serve_apps.workflows.math_chain import MathChain
from tests.model_folders import change_json, write_model

pytestmark = pytest.mark.fast

DEMO = yaml.safe_load((Path(__file__).parents[3] / "infra" / "runs" / "demo.yaml").read_text())


def changed(changes: Mapping[str, Any], *, without: str = "") -> dict[str, Any]:
    """The demo's config with dotted keys set and one section left out."""
    data = copy.deepcopy(DEMO)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        section = data
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    data.pop(without, None)
    return data


def begun_from(folder: str) -> dict[str, Any]:
    """The changes with which all groups of the demo begin from the model in `folder`."""
    return {f"model_groups.{group}.model": folder for group in DEMO["model_groups"]} | {"warmstart.tiny_model": None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agents.solver": {"top_p": 0.9}}, r"agents\.solver\.top_p = 0\.9: training turns are sampled unfiltered"),
        ({"agents.solver": {"top_k": 20}}, r"agents\.solver\.top_k = 20: training turns"),
        ({"agents.solver": {"min_p": 0.1}}, r"agents\.solver\.min_p = 0\.1: training turns"),
        ({"train.optimizer.lr": float("inf")}, r"train\.optimizer\.lr: inf is no finite number: give one"),
        ({"train.optimizer.lr": "inf"}, r"train\.optimizer\.lr: Input should be a finite number \(got 'inf'\)"),
        ({"train.loss.entropy_coef": float("nan")}, r"train\.loss\.entropy_coef: nan is no finite number"),
        ({"train.optimizer.betas": [0.9, float("nan")]}, r"train\.optimizer\.betas\.1: nan is no finite number"),
        (
            {"credit.settings.format_weight": -float("inf")},
            r"credit\.settings\.format_weight: -inf is no finite number",
        ),
        (
            {"storage.root": "~/runs"},
            r"storage\.root: ~/runs: no shell reads this, and ~/ would be a folder: write the whole",
        ),
        ({"tasks.train": {"path": "$HOME/t.jsonl"}}, r"tasks\.train\.path: \$HOME/t\.jsonl: no shell reads this"),
        (
            {"workflow.settings": {"corpus": ["${DATA}/wiki"]}},
            r"workflow\.settings\.corpus\.0: \$\{DATA\}/wiki: no shell",
        ),
        ({"cost": {"at_most": 5, "prices": {"solver_verifier": "nan"}}}, r"prices\.solver_verifier: .*finite number"),
        ({"seed": -1}, r"seed: Input should be greater than or equal to 0 \(got -1\)"),
        ({"iteratons": 3}, r"unknown key 'iteratons': did you mean 'iterations'\?"),
        ({"train.optimiser": {"lr": 1}}, r"unknown key 'train\.optimiser': did you mean 'optimizer'\?"),
        ({"train.loss.clip_hihg": 0.3}, r"unknown key 'train\.loss\.clip_hihg': did you mean 'clip_high'\?"),
        ({"model_groups.refiner_finalizer.agent": []}, r"refiner_finalizer\.agent': did you mean 'agents'\?"),
        (
            {"train.loss": {"kl_in_loss_estimator": "k1"}},
            r"kl_in_loss_estimator: k1 in the loss has a gradient of mean zero",
        ),
        *(
            ({f"model_groups.{name}": {"agents": ["other"]}}, rf"model_groups: '{name}' is to name a folder and an app")
            for name in ("a/b", "a b", "-a", "ä")
        ),
        ({"train.loss": {"reference_every": 5}}, r"loss\.reference_every needs a KL"),
        (
            {"pool": "shared", "serve.gpus": 0.5},
            r"pool: shared, model group 'solver_verifier': serve\.gpus = 0\.5 and train\.gpus_per_worker = 0 share no GPU",
        ),
        (
            {"pool": "shared", "serve.gpus": 1, "train.gpus_per_worker": 0.5},
            r"serve\.gpus = 1 and train\.gpus_per_worker = 0\.5 do not fit on one GPU: give shares",
        ),
        (
            {"pool": "shared", "serve.gpus": 0.5, "serve.num_replicas": 2, "train.gpus_per_worker": 0.5},
            r"Ray may put two of serve\.num_replicas = 2 engines.*more than half of it",
        ),
        (
            {"pool": "shared", "serve.gpus": 0.6, "train.gpus_per_worker": 0.2, "train.num_workers": 2},
            r"or of train\.num_workers = 2, on one GPU: give",
        ),
        (
            {"pool": "shared", "serve.gpus": 0.6, "train.gpus_per_worker": 0.4, "train.num_workers": 3},
            r"train\.num_workers of all model groups reserve 3\.6 GPUs, but .* serve\.num_replicas add up to 2",
        ),
        (
            {"pool": "shared", "serve.gpus": 0.6, "train": {"gpus_per_worker": 0.4, "lora": {"rank": 8}}}
            | {f"model_groups.{group}.base": "base" for group in DEMO["model_groups"]},
            r"train\.num_workers of all model groups reserve 1\.4 GPUs, but .* serve\.num_replicas add up to 1",
        ),
        (
            {"pool": "shared", "serve.gpus": 0.5, "train.gpus_per_worker": 0.5, "serve.tensor_parallel_size": 2},
            r"serve\.tensor_parallel_size = 2: Ray gives an engine several GPUs only as a whole",
        ),
        (
            {"loop.max_lag": 1, "pool": "shared", "serve.gpus": 0.5, "train.gpus_per_worker": 0.5},
            r"loop\.max_lag = 1: with pool: shared the engines sleep .*pool: separate",
        ),
        (
            {"loop.max_lag": 1, "train.mismatch": {"old_logprobs": "rollout_if_close"}},
            r"loop\.max_lag = 1: model group 'solver_verifier': .*set recompute",
        ),
        (
            {"train": {"algorithm": "ppo", "critic": {"kind": "shared", "optimizer": {"lr": 1e-3}}}},
            r"train\.critic: .*critic\.kind: shared does not read: .*by train\.optimizer: drop it, or take kind: own",
        ),
        (
            {"warmstart.optimizer": {"schedule": "linear", "decay_steps": 40}},
            r"warmstart: .*schedule: linear is not read here: .*drop schedule, decay_steps and min_lr_share",
        ),
        (
            {"loop.max_lag": 2, "promote.deploy": "canary"},
            r"loop\.max_lag = 2: promote\.deploy = 'canary' holds the gate",
        ),
        (
            {"loop.max_lag": 2, "schedule": {"cron": "@continuous"}},
            r"loop\.max_lag = 2: schedule\.cron = '@continuous' allows one DAG run at a time, and overlap needs 3",
        ),
        ({"train.zzz": 1}, r"unknown key 'train\.zzz'; there are advantage, agents, algorithm, "),
        (
            {"model_groups.solver_verifier.train": {"loss": {"clip_hihg": 1}}},
            r"model_groups\.solver_verifier\.train: unknown key 'loss\.clip_hihg': did you mean 'clip_high'\?",
        ),
        (
            {"train.agents": {"solvr": {"weight": 2}}},
            r"train\.agents: 'solvr' is mapped to no model group: did you mean 'solver'\?",
        ),
        (
            {"model_groups.solver_verifier.train": {"agents": {"refiner": {}}}},
            r"solver_verifier\.train\.agents: 'refiner' is no agent of this model group",
        ),
        (
            {"train.agents": {"solver": {"weight": 0}, "verifier": {"weight": 0}}},
            r"'solver_verifier' has weight 0 \(solver, verifier\).*give one of them a weight above 0",
        ),
        (
            {"cost": {"at_most": 50, "prices": {"solver": 2}}},
            r"cost\.prices: 'solver' is no model group; there are refiner_finalizer, solver_verifier",
        ),
        (
            {"cost": {"at_most": 50}, "train.algorithm": "grpo"},
            r"cost: model group 'solver_verifier': grpo compares episodes",
        ),
        (
            {"cost": {"at_most": 50}, "collect.dynamic_sampling": {}},
            r"cost: collect\.dynamic_sampling leaves out tasks whose episodes all have one outcome",
        ),
        (
            {
                "cost": {"at_most": 50},
                "train.algorithm": "leave_one_out",
                "collect.variants": {"kind": "leave_one_out"},
            },
            r"cost: collect\.variants of kind leave_one_out plays episodes whose outcomes are baselines",
        ),
        (
            {"cost": {"at_most": 50, "prices": {"solver_verifier": -1}}},
            r"cost\.prices: solver_verifier: -1\.0 is no price",
        ),
        ({"evaluate.every": 0}, r"evaluate\.every: .*greater than or equal to 1 \(got 0\)"),
        ({"run": "../demo"}, r"run: .*\(got '\.\./demo'\)"),
        ({"workflow.path": "serve_apps.workflows.math_chain"}, r"workflow\.path: .*'package\.module:Name'"),
        (
            {"model_groups.copy": {"agents": ["solver"]}},
            r"'solver' is mapped to two model groups, 'solver_verifier' and",
        ),
        (
            {"collect.call": {"call_timeout_s": 300}},
            r"collect\.call\.call_timeout_s = 300 s is not below collect\.episode",
        ),
        (
            {"sync.proof_noise": 0.01, "sync.proof_tolerance": 0.001},
            r"sync: .*proof_noise = 0\.01 is above proof_tolerance = 0\.001: raise the second",
        ),
        ({"collect.stage_timeout_s": 600}, r"episode_timeout_s = 600 s is not below collect\.stage_timeout_s = 600 s"),
        ({"model_groups.solver_verifier.train": {"lr": 1}}, r"model_groups\.solver_verifier\.train: unknown key 'lr'"),
        ({"tasks.train.path": "tasks.jsonl"}, r"tasks\.train: give exactly one of `path` and `generator`"),
        ({"warmstart": None}, r"model_groups\.solver_verifier\.model is missing: name a Hugging Face folder"),
        (
            {"model_groups.refiner_finalizer.model": "m"},
            r"model_groups\.refiner_finalizer\.model = 'm' .* warmstart\.tiny_model .*: drop `model`, or set "
            r"warmstart\.tiny_model: null",
        ),
    ],
)
def test_what_the_fields_say_wrong_is_named_when_it_is_parsed(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_config(changed(changes), "run.yaml")


@pytest.mark.parametrize("section", ["run", "workflow", "credit", "model_groups", "tasks"])
def test_a_missing_section_is_named(section: str) -> None:
    with pytest.raises(ValueError, match=f"run.yaml: '{section}' is missing"):
        parse_config(changed({}, without=section), "run.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workflow.path": "no_such_module:Chain"}, r"workflow\.path: cannot import 'no_such_module'"),
        ({"workflow.path": "serve_apps.workflows.math_chain:Chain"}, r"has no 'Chain'; did you mean 'MathChain'"),
        (
            {"workflow.path": "pipelines.config.run_config:RunConfig"},
            r"RunConfig, and must be a subclass of",
        ),
        ({"workflow.settings": {"rounds": 2}}, r"workflow\.settings: unknown key 'rounds'"),
        ({"credit.path": "pipelines.credit.nothing:Rule"}, r"credit\.path: cannot import 'pipelines\.credit\.nothing'"),
        (
            {"cost": {"at_most": 50}, "credit": {"path": "pipelines.credit.math_progress:MathProgress"}},
            r"cost: credit rule 'pipelines\.credit\.math_progress:MathProgress' gives increments",
        ),
        ({"credit.settings": {"wieght": 1}}, r"credit\.settings: .*'wieght'"),
        (
            {"model_groups.solver_verifier.agents": ["solver"]},
            r"agent 'verifier' of the workflow is mapped to no model group",
        ),
        (
            {"model_groups.solver_verifier.agents": ["solver", "verifer"]},
            r"model_groups\.solver_verifier\.agents: 'verifer' is no agent of the workflow: did you mean 'verifier'\?",
        ),
        ({"agents.planner": {"max_tokens": 8}}, r"agents: 'planner' is no agent of the workflow; there are finalizer"),
        ({"tasks.train": {"path": "nowhere.jsonl"}}, r"tasks\.train: task file nowhere\.jsonl does not exist"),
        ({"collect.tasks_per_iteration": 1101}, r"tasks_per_iteration = 1101 but tasks\.train holds 1100"),
        ({"tasks.gate": None}, r"tasks\.gate is missing"),
        (begun_from("nowhere"), r"solver_verifier\.model: folder nowhere does not exist"),
        ({"serve.max_model_len": 1024}, r"max_model_len = 1024 but warmstart\.tiny_model\.max_position = 512"),
        (
            {"warmstart.demonstrator": "pipelines.examples.arithmetic.tasks:nobody"},
            r"warmstart\.demonstrator: .*has no 'nobody'",
        ),
    ],
)
def test_what_cannot_start_is_named_by_validate(changes: dict[str, Any], said: str) -> None:
    config = parse_config(changed(changes), "run.yaml")
    with pytest.raises(ValueError, match=said):
        check(config)


class Greedy(MathChain):
    """The demo's workflow with one agent that cannot train."""

    solver = replace(MathChain.solver, temperature=0.0)


def test_an_agent_whose_turns_cannot_train_is_named_unless_the_config_changes_it() -> None:
    greedy = {"workflow.path": "test_config:Greedy"}
    with pytest.raises(ValueError, match=r"agents\.solver: it would be sampled with .*temperature=0\.0.* above 0"):
        check(parse_config(changed(greedy), "run.yaml"))
    check(parse_config(changed({**greedy, "agents.solver": {"temperature": 1.0}}), "run.yaml"))


def test_a_model_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = parse_config(changed(begun_from(str(tmp_path))), "run.yaml")
    with pytest.raises(ValueError, match=r"has no tokenizer \(tokenizer\.json\)"):
        check(config)


def test_a_model_with_a_shorter_context_than_asked_for_is_named(tmp_path: Path) -> None:
    change_json(write_model(tmp_path, head_dim=32) / "config.json", max_position_embeddings=128)
    config = parse_config(changed(begun_from(str(tmp_path))), "run.yaml")
    with pytest.raises(ValueError, match=r"serve\.max_model_len = 256 but the model of 'solver_verifier' takes 128"):
        check(config)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"run: [demo", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"- run\n- demo\n", "is a mapping of sections, this is list"),
        (b"", "is a mapping of sections, this is NoneType"),
    ],
)
def test_a_file_that_is_no_run_config_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run config .*nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


def test_every_fault_of_a_file_is_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        parse_config(changed({"sede": 1, "iterations": 0, "train.lr": 1}), "run.yaml")
    assert len(str(caught.value).splitlines()) == 3


def test_a_dotted_override_changes_one_key_and_keeps_its_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(DEMO))
    config = load_config(path, {"train.optimizer.lr": 0.5, "iterations": 2})
    before = load_config(path)
    assert (config.train.optimizer.lr, config.iterations) == (0.5, 2)
    assert config.train.optimizer.betas == before.train.optimizer.betas
    with pytest.raises(ValueError, match=r"--set seed\.x: 'seed' is not a section"):
        load_config(path, {"seed.x": 1})


def test_a_change_of_one_place_leaves_the_others_that_an_anchor_of_yaml_names(tmp_path: Path) -> None:
    parts = "shares: &parts {train: 0.8, gate: 0.1, test: 0.1}}\n"
    sets = f"tasks:\n  train: {{path: t.jsonl, {parts}  gate: {{path: t.jsonl, shares: *parts}}\n"
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(changed({}, without="tasks")) + sets)
    path = tmp_path / "run.yaml"
    path.write_text("extends: base.yaml\ntasks: {train: {shares: {train: 0.5}}}\n")
    of_file, of_option = load_config(path), load_config(tmp_path / "base.yaml", {"tasks.train.shares.train": 0.5})
    for config in (of_file, of_option):
        assert config.tasks.gate is not None
        assert (config.tasks.train.shares["train"], config.tasks.gate.shares["train"]) == (0.5, 0.8)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("traces", "traces"),
        ("served", "served"),
        ("weights", "../weights"),
        ("artifacts", "artifacts"),
        ("journal", "sqlite:///journal.db"),
        ("mlflow", "sqlite+pysqlite:///mlflow.db"),
    ],
)
def test_a_store_within_a_working_directory_that_ends_with_the_job_is_refused(key: str, place: str) -> None:
    stores = {
        "root": "/data",
        "traces": "/t",
        "served": "s3://b/s",
        "weights": "file:///w",
        "journal": "sqlite:////j.db",
    }
    cluster = {"cluster": {"working_dir": "."}}
    parse_config(changed(cluster | {"storage": stores}), "run.yaml")
    with pytest.raises(
        ValueError, match=rf"storage\.{key} = '{place.replace('+', '.')}' is relative, .*: give storage\.{key} as"
    ):
        parse_config(changed(cluster | {"storage": stores | {key: place}}), "run.yaml")


def test_a_run_config_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    settings = {"hint": "Größe 数"}
    text = yaml.safe_dump(changed({"workflow.settings": settings}), allow_unicode=True)
    path.write_text(text, encoding="utf-8")
    code = f"from pipelines.config.run_config import load_config; print(ascii(load_config({str(path)!r}).workflow.settings))"
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    shown = subprocess.run([sys.executable, "-c", code], env=os.environ | plain, capture_output=True, text=True)
    assert shown.stdout.strip() == ascii(settings), shown.stderr


def test_a_dotted_override_goes_through_a_section_that_is_null(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(changed({"collect.budget": {}, "cost": None})))
    config = load_config(path, {"cost.at_most": 50, "cost.prices.solver_verifier": 2})
    assert config.cost is not None and (config.cost.at_most, config.cost.prices) == (50, {"solver_verifier": 2})


def test_a_config_begins_from_another_and_replaces_its_mapping_whole(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(DEMO))
    (tmp_path / "more").mkdir()
    path = tmp_path / "more" / "run.yaml"
    team = {"team": {"agents": ["solver", "verifier", "refiner", "finalizer"]}}
    path.write_text(
        yaml.safe_dump({"extends": "../base.yaml", "collect": {"episodes_per_task": 4}, "model_groups": team})
    )
    base, config = load_config(tmp_path / "base.yaml"), load_config(path, {"seed": 7})
    assert (config.collect.episodes_per_task, config.seed) == (4, 7)
    assert config.collect.tasks_per_iteration == base.collect.tasks_per_iteration
    assert list(config.model_groups) == ["team"]


def test_a_base_that_is_missing_or_leads_in_a_circle_is_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text("extends: gone.yaml")
    with pytest.raises(ValueError, match=r"gone\.yaml \(named by `extends` in .*one\.yaml\) does not exist"):
        load_config(one)
    one.write_text("extends: other.yaml")
    other.write_text("extends: one.yaml")
    with pytest.raises(ValueError, match=r"extends = one\.yaml leads back to itself: .*one\.yaml -> .*other\.yaml -> "):
        load_config(one)
    one.write_text("extends: [other.yaml]")
    with pytest.raises(ValueError, match=r"extends = \['other\.yaml'\] is no path: name one run config"):
        load_config(one)


def test_a_model_group_may_be_of_another_family() -> None:
    data = changed({"model_groups.solver_verifier.tiny_model": {"architecture": "llama", "vocab_size": 400}})
    config = parse_config(data, "run.yaml")
    shapes = [config.tiny_model(group) for group in ("solver_verifier", "refiner_finalizer")]
    assert [(s.architecture, s.vocab_size) for s in shapes if s] == [("llama", 400), ("qwen3", 512)]
    assert config.sha256 != parse_config(DEMO, "run.yaml").sha256
    with pytest.raises(
        ValueError, match=r"model_groups\.solver_verifier\.tiny_model: .*layers.*did you mean 'num_layers'"
    ):
        parse_config(changed({"model_groups.solver_verifier.tiny_model": {"layers": 2}}), "run.yaml")
    without = changed({f"model_groups.{group}.model": "m" for group in DEMO["model_groups"]}, without="warmstart")
    without["model_groups"]["solver_verifier"]["tiny_model"] = {"architecture": "llama"}
    with pytest.raises(ValueError, match=r"there is no warmstart\.tiny_model that it could change"):
        parse_config(without, "run.yaml")


def test_overrides_of_a_model_group_hold_for_it_alone() -> None:
    config = parse_config(changed({"model_groups.solver_verifier.train": {"optimizer": {"lr": 0.5}}}), "run.yaml")
    assert config.train_config("solver_verifier").optimizer.lr == 0.5
    assert config.train_config("solver_verifier").num_minibatches == config.train.num_minibatches
    assert config.train_config("refiner_finalizer") == config.train


def test_what_changes_results_changes_the_identity_and_what_does_not_does_not() -> None:
    first = parse_config(DEMO, "run.yaml")
    same: tuple[dict[str, Any], ...] = (
        {"iterations": 20},
        {"storage": {"root": "elsewhere"}},
        {"serve.num_replicas": 2},
        {"gateway": {"port": 8123, "capture": {"share": 0.5}}},
        {"traffic.shares": [0.5]},
    )
    other = (
        {"seed": 1},
        {"train.optimizer.lr": 0.5},
        {"agents.solver.max_tokens": 41},
        {"collect.episodes_per_task": 4},
    )
    assert all(parse_config(changed(c), "run.yaml").sha256 == first.sha256 for c in same)
    traces = {"uri": "traces", "run": "other"}
    chosen, elsewhere = (
        begun_from("model") | {"warmstart": {"traces": t}} for t in (traces, traces | {"weights": "weights"})
    )
    assert parse_config(changed(chosen), "run.yaml").sha256 == parse_config(changed(elsewhere), "run.yaml").sha256
    assert len({first.sha256, *(parse_config(changed(c), "run.yaml").sha256 for c in other)}) == 1 + len(other)


@given(
    key=st.text(alphabet="abcdefghij_", min_size=1, max_size=12).filter(lambda key: key not in RunConfig.model_fields)
)
def test_no_unknown_key_is_ever_taken(key: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}'"):
        parse_config(changed({key: 1}), "run.yaml")


def test_workers_without_gpus_take_no_engines_gpu() -> None:
    assert parse_config(changed({"pool": "shared", "train.num_workers": 2}), "run.yaml").pool == "shared"


def test_a_key_that_was_a_setting_once_is_refused_in_a_file_and_a_stored_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(changed({"collect.write_batch": 3})))
    with pytest.raises(ValueError, match=r"'collect\.write_batch' is no setting any more, 128 episodes .*: drop it"):
        load_config(tmp_path / "run.yaml")
    gone = {"collect.write_batch": 3, "cluster": {"num_cpus": None}, "train.loss.kl_in_reward_estimator": "k1"}
    stored = parse_config(changed(gone), "the config of a run")
    assert stored == parse_config(DEMO, "run.yaml")


def test_a_key_that_was_a_setting_of_one_model_group_once_is_read_likewise(tmp_path: Path) -> None:
    key = "model_groups.solver_verifier.serve"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(changed({key: {"drain_timeout_s": 5}})))
    with pytest.raises(
        ValueError, match=r"solver_verifier\.serve\.drain_timeout_s' is no setting any more, .*: drop it"
    ):
        load_config(tmp_path / "run.yaml")
    stored = parse_config(changed({key: {"drain_timeout_s": 5}}), "the config of a run")
    assert stored == parse_config(changed({key: {}}), "run.yaml")


def test_learning_signals_are_given_to_all_groups_or_to_one() -> None:
    changes = {
        "train.agents": {"solver": {"weight": 2.0}, "finalizer": {"weight": 0}},
        "model_groups.solver_verifier.train": {"agents": {"verifier": {"weight": 0.5}}},
    }
    config = parse_config(changed(changes), "run.yaml")
    signals = config.train_config("solver_verifier").agents
    assert {agent: signals[agent].weight for agent in config.agents_of("solver_verifier")} == {
        "solver": 2.0,
        "verifier": 0.5,
    }


def test_one_agent_of_a_model_group_may_be_left_untrained() -> None:
    config = parse_config(changed({"train.agents": {"verifier": {"weight": 0}}}), "run.yaml")
    assert config.train_config("solver_verifier").agents["verifier"].weight == 0
