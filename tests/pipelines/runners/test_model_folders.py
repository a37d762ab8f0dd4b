"""What `troupe validate` says of model folders: twenty and more that are broken, each with the file and the fix, and whole ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import RunConfig, load_config
from pipelines.runners.validate import check
from serve_apps.chat import template_process
from serve_apps.config import CPU_HEAD_SIZES
from stores.weights.model_folder import why_windowed
from tests.model_folders import CONFIG, SHAPES, change_json, tensors_of, write_model, write_tensors
from tests.small_tokenizers import SWITCH

pytestmark = pytest.mark.fast

DEMO = Path(__file__).parents[3] / "infra" / "runs" / "demo.yaml"


def changes_of(folder: Path) -> dict[str, Any]:
    """The demo's groups begin with the model in `folder`."""
    groups = ("solver_verifier", "refiner_finalizer")
    return {f"model_groups.{g}.model": str(folder) for g in groups} | {"warmstart.tiny_model": None, "serve.gpus": 1}


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return load_config(DEMO, changes_of(folder) | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder, of which each case gets a copy."""
    folder = write_model(tmp_path_factory.mktemp("whole") / "model")
    check(config_of(folder))
    return folder


def remove(*patterns: str) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return broken


def write(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode()) and None


def change(name: str, **changes: object) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / name, **changes)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def two_saves(folder: Path) -> None:
    write_tensors(folder / "old.safetensors", {"model.embed_tokens.weight": [1, 1]})


def without_a_layer(folder: Path) -> None:
    config = {**CONFIG, **SHAPES["qwen"], "tie_word_embeddings": True}
    tensors = {name: shape for name, shape in tensors_of(config).items() if "layers.1" not in name}
    write_tensors(folder / "model.safetensors", tensors)


def no_json_list(folder: Path) -> None:
    data = b'["model.embed_tokens.weight"]'
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)


BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # what is done to a whole folder, the file that is named, what the message says
    "config that is {": (write("config.json", "{"), "config.json", "is not JSON"),
    "config that is a list": (write("config.json", "[]"), "config.json", "holds no JSON object"),
    "config without a type": (change("config.json", model_type=None), "config.json", "no model_type"),
    "no config": (remove("config.json"), "config.json", "save it beside the weights"),
    "code of its own": (change("config.json", auto_map={"AutoModel": "m.M"}), "config.json", "remove auto_map"),
    "a tokenizer of its own": (
        change("tokenizer_config.json", auto_map={"AutoTokenizer": ["t.T", None]}),
        "tokenizer_config.json",
        "remove auto_map",
    ),
    "a huge hidden size": (change("config.json", hidden_size=10**9), "config.json", "hidden_size = 1000000000"),
    "a hidden size in words": (change("config.json", hidden_size="32"), "config.json", "hidden_size = '32' is no size"),
    "another vocabulary": (change("config.json", vocab_size=1000), "config.json", "vocab_size = 1000"),
    "another MLP": (change("config.json", intermediate_size=65), "config.json", "intermediate_size = 65"),
    "other heads": (change("config.json", num_key_value_heads=4), "config.json", "num_key_value_heads = 4"),
    "too many layers": (
        change("config.json", num_hidden_layers=10**9),
        "config.json",
        "num_hidden_layers = 1000000000",
    ),
    "a layer that is not named": (
        change("config.json", num_hidden_layers=1),
        "config.json",
        "holds model.layers.1.input_layernorm",
    ),
    "a layer that is missing": (without_a_layer, "config.json", "num_hidden_layers = 2"),
    "a head that is missing": (
        change("config.json", tie_word_embeddings=False),
        "config.json",
        "must say tie_word_embeddings = true",
    ),
    "only pytorch_model.bin": (only_pickled, "pytorch_model.bin", "save it with save_pretrained"),
    "no weights": (remove("*.safetensors"), "safetensors", "no weights"),
    "cut weights": (cut, "model.safetensors", "copy it again"),
    "empty weights": (write("model.safetensors", b""), "model.safetensors", "copy it again"),
    "weights that are text": (
        write("model.safetensors", "version https://git-lfs"),
        "model.safetensors",
        "copy it again",
    ),
    "a header that is a list": (no_json_list, "model.safetensors", "copy it again"),
    "two saves without an index": (two_saves, "old.safetensors", "keep those of one save"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json", "save it beside the weights"),
    "a tokenizer that is {}": (write("tokenizer.json", "{}"), "tokenizer.json", "copy it from the model's source"),
    "no chat template": (remove("chat_template.jinja"), "chat_template.jinja", "add chat_template.jinja"),
    "a template that does not parse": (
        write("chat_template.jinja", "{% for m in messages %}{{ m.content }}"),
        "chat_template.jinja",
        "fails on a plain conversation",
    ),
    "a template that refuses": (
        write("chat_template.jinja", "{{ raise_exception('only one message') }}"),
        "chat_template.jinja",
        "only one message",
    ),
    "a template that forgets the user": (
        write("chat_template.jinja", "{% for m in messages %}{{ m.role }}{% endfor %}"),
        "chat_template.jinja",
        "leaves out what the user says first",
    ),
    **{
        f"a template that writes {template[:20]}": (write("chat_template.jinja", template), "chat_template.jinja", said)
        for template, said in (
            ("{{ 1/0 }}", "division by zero"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
            ("{{ range(10**10) }}", "Range too big"),
            ("{{ '{}'.format() }}", "out of range"),
            ("{{ 'a'.encode('b') }}", "unknown encoding"),
            ("{{ messages[0].content }}{{ '\\ud800' }}", "surrogates not allowed"),
        )
    },
    "a template that is not UTF-8": (
        write("chat_template.jinja", b"ab\xff"),
        "chat_template.jinja",
        "not UTF-8 (byte 2)",
    ),
    "settings that are not UTF-8": (write("tokenizer_config.json", b"{\xff"), "tokenizer_config.json", "JSON"),
    "an end token that is none": (
        change("tokenizer_config.json", eos_token="</nowhere>"),
        "tokenizer_config.json",
        "name one of its tokens",
    ),
    "an end token in words": (
        change("generation_config.json", eos_token_id="</s>"),
        "generation_config.json",
        "is no token id",
    ),
    "a broken generation config": (write("generation_config.json", "{"), "generation_config.json", "is not JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_the_file_and_the_fix(case: str, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    breaks, file, said = BROKEN[case]
    breaks(folder)
    with pytest.raises(ValueError) as caught:
        check(config_of(folder))
    message = str(caught.value)
    assert message.startswith("model_groups.solver_verifier.model: ") and str(folder) in message
    assert file in message and said in message, message


FOR_YEARS = "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
END = "{% endfor %}" * 3
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = {
    # a chat template, what the message says, seconds that it gets
    "loops for years": (FOR_YEARS + END + ALL, "did not end within 2 s", 2.0),
    "loops where there are tools": (
        "{% if tools %}" + FOR_YEARS + END + "{% endif %}" + ALL,
        "did not end within 3 s",
        3.0,
    ),
    "loops where no answer is asked for": (
        "{% if not add_generation_prompt %}" + FOR_YEARS + END + "{% endif %}" + ALL,
        "did not end within 3 s",
        3.0,
    ),
    "writes without end": (FOR_YEARS + "{{ 'a' * 1000 }}" + END, "it writes more than 1,000,000 characters", 30.0),
    "fills the memory": (
        "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a * 9 %}{% endfor %}" + ALL,
        "it needs more than 1024 MiB of memory",
        30.0,
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.nightly if case.startswith("loops where") else pytest.mark.test)
        for case in ENDLESS
    ],
)
def test_a_template_that_does_not_end_is_given_up(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model")
    template, said, limit_s = ENDLESS[case]
    (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(template_process, "LIMIT_S", limit_s)
    with pytest.raises(ValueError) as caught:
        check(config_of(folder))
    message = str(caught.value)
    assert str(folder / "chat_template.jinja") in message and said in message, message
    assert "correct it, or copy it from the model's source" in message


def test_no_end_token_at_all_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    change_json(folder / "tokenizer_config.json", eos_token=None)
    change_json(folder / "config.json", eos_token_id=None)
    change_json(folder / "generation_config.json", eos_token_id=None)
    with pytest.raises(ValueError, match=r"names no end token.*set eos_token in tokenizer_config.json"):
        check(config_of(folder))


def test_tokens_beyond_the_embeddings_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = {**CONFIG, **SHAPES["qwen"], "tie_word_embeddings": True, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors_of(config))
    with pytest.raises(ValueError, match=r"tokenizer.json gives .* the id \d+, but config.json says vocab_size = 300"):
        check(config_of(folder))


def lost_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def swapped_shard(folder: Path) -> None:
    write_tensors(folder / "model-00002-of-00002.safetensors", {"model.other.weight": [32]})


def stray(folder: Path) -> None:
    write_tensors(folder / "consolidated.safetensors", {"tok_embeddings.weight": [1024, 32]})


SHARDED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a shard that is missing": (lost_shard, "model-00002-of-00002.safetensors", "1 of 2 files that"),
    "a shard of another save": (swapped_shard, "model-00002-of-00002.safetensors", "not of one save"),
    "a stray consolidated file": (stray, "consolidated.safetensors", "remove it"),
    "an index that is {": (write("model.safetensors.index.json", "{"), "model.safetensors.index.json", "is not JSON"),
    "an index without a map": (
        write("model.safetensors.index.json", "{}"),
        "model.safetensors.index.json",
        "no weight_map",
    ),
}


@pytest.mark.parametrize("case", SHARDED)
def test_a_broken_set_of_shards_is_refused_with_the_file_and_the_fix(case: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    breaks, file, said = SHARDED[case]
    breaks(folder)
    with pytest.raises(ValueError) as caught:
        check(config_of(folder))
    assert file in str(caught.value) and said in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_folder_is_ok_with_tied_and_untied_head(family: str, tied: bool, tmp_path: Path) -> None:
    check(config_of(write_model(tmp_path / "model", family, tied=tied)))


def test_a_sharded_bf16_folder_is_ok(tmp_path: Path) -> None:
    check(config_of(write_model(tmp_path / "model", "llama", shards=3, dtype="BF16")))


def test_a_template_in_the_tokenizers_config_is_ok(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    change_json(folder / "tokenizer_config.json", chat_template=template)
    check(config_of(folder))
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ tools }}"}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    check(config_of(folder))


@pytest.mark.test
def test_the_tiny_model_is_ok(tiny_model: Path) -> None:
    check(config_of(tiny_model))


@pytest.mark.test
def test_a_parser_must_be_vllms_and_fit_the_model(tiny_model: Path) -> None:
    group = changes_of(tiny_model)
    with pytest.raises(
        ValueError, match=r"model_groups.solver_verifier: serve.tool_parser = 'hermez': vLLM has no such"
    ):
        check(load_config(DEMO, {**group, "serve.tool_parser": "hermez"}))
    check(load_config(DEMO, {**group, "serve.tool_parser": "pythonic", "serve.reasoning_parser": "none"}))


@pytest.mark.test
def test_a_variable_of_a_chat_template_must_be_one_that_it_reads(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + SWITCH)
    of_group = {"model_groups.solver_verifier.chat_template_kwargs": {"enable_thinking": False}}
    config = config_of(folder, **of_group, agents={"verifier": {"chat_template_kwargs": {"enable_thinking": True}}})
    check(config)
    assert config.template_kwargs(config.group_of) == {
        "solver": {"enable_thinking": False},
        "verifier": {"enable_thinking": True},
    }
    assert "chat_template_kwargs" not in config.agent_changes("verifier")
    wrong = config_of(folder, agents={"refiner": {"chat_template_kwargs": {"thinking": False}}})
    with pytest.raises(ValueError, match=r"chat_template_kwargs of agent 'refiner': .* reads no variable thinking: "):
        check(wrong)


def test_a_folder_is_read_without_torch_and_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    code = (
        "import sys; from pathlib import Path; from pipelines.config.run_config import load_config; "
        "from pipelines.runners.validate import check; "
        f"check(load_config(Path({str(DEMO)!r}), {changes_of(folder)!r})); "
        "assert not {'torch', 'transformers', 'vllm', 'ray'} & sys.modules.keys(), 'heavy'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=DEMO.parents[2], check=False
    )
    assert done.returncode == 0, done.stderr


KINDS = ["sliding_attention", "full_attention"]
WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"layer_types": ["full_attention"] * 2, "sliding_window": 8}, ""),
    "gemma 3": ({"model_type": "gemma3_text", "layer_types": KINDS}, "layers of sliding_attention"),
    "gemma 3 of the first day": ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, "type gemma3_text"),
    "gemma 3 with pictures": ({"model_type": "gemma3", "text_config": {"layer_types": KINDS}}, "sliding_attention"),
    "mistral 7B 0.1": ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
    "mistral 7B 0.2": ({"model_type": "mistral", "sliding_window": None}, ""),
    "qwen2.5": ({"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}, ""),
    "qwen2 with windows": ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, "= 8"),
    "llama": ({"model_type": "llama"}, ""),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_layers_with_windows_are_known_by_the_config(case: str) -> None:
    config, said = WINDOWS[case]
    assert (said in why_windowed(config)) if said else (why_windowed(config) == "")


def test_rows_of_a_model_with_windows_are_padded_and_packing_them_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "gemma")
    lines = [line for line in check(config_of(folder)) if "padded, not packed" in line]
    assert len(lines) == 2 and all("train.rows.pack" in line and "gemma2" in line for line in lines)
    with pytest.raises(ValueError, match=r"train\.rows\.pack = true, but .*sliding_attention.*set it to auto or false"):
        check(config_of(folder, **{"train.rows.pack": True}))
    assert not any("packed" in line for line in check(config_of(folder, **{"train.rows.pack": False})))
    other = write_model(tmp_path / "qwen", "qwen")
    assert not any("packed" in line for line in check(config_of(other, **{"train.rows.pack": True})))
    assert json.loads(config_of(other).model_dump_json())["train"]["rows"]["pack"] == "auto"
    for model, said in ((folder, "sliding_attention"), (other, r"the model has \d+ attention heads")):
        with pytest.raises(ValueError, match=rf"sequence_parallel = 3, but .*{said}: workers cannot share"):
            check(config_of(model, **{"train.num_workers": 3, "train.deepspeed.sequence_parallel": 3}))


@pytest.mark.nightly
def test_heads_that_a_cpu_engine_does_not_take_are_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head_dim=16)
    with pytest.raises(
        ValueError,
        match=r"solver_verifier\.model: head_dim of config\.json: attention heads .* have 16 numbers.* takes 32, 64.*serve\.gpus: 1",
    ):
        check(config_of(folder, **{"serve.gpus": 0}))
    check(config_of(folder))


def test_heads_of_a_tiny_model_that_a_cpu_engine_does_not_take_are_refused() -> None:
    small = Path(__file__).parents[2] / "e2e" / "small.yaml"
    changes = {"warmstart.tiny_model.head_dim": 24}
    with pytest.raises(ValueError, match=r"warmstart\.tiny_model\.head_dim: attention heads of .* have 24 numbers"):
        check(load_config(small, changes))
    check(load_config(small, changes | {"serve.engine_kind": "transformers"}))


@pytest.mark.nightly
def test_the_sizes_of_heads_are_those_of_the_engine() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
