"""Tiny models with random weights, updates made of them, and real servers to give them to."""

import asyncio
import os
import subprocess
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.building import build_engine, dialect_of
from astraflow.engines.protocol import Engine
from astraflow.engines.served.dialect import AdapterLimits, Dialect, ServerSetup
from astraflow.engines.served.exchange import ExchangeFolder
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.served.server import environment, free_port, kept_command

POLICY = PolicyId("sort")
LETTERS = "abcdefghij>"

SERVERS = ("vllm", "sglang")
LONG = {"max_position_embeddings": 8192}
# A letter that models with a bell never sample until it rings, and always from then on.
BELL = 13

disable_progress_bar()


VARIABLES = {kind: f"ASTRAFLOW_{kind.upper()}_PYTHON" for kind in SERVERS}
# An interpreter for each release of a server: a variable may name several, as PATH does folders.
RELEASES = {
    kind: [path for path in os.environ.get(name, "").split(os.pathsep) if path]
    for kind, name in VARIABLES.items()
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat every test for each release; those that need no server are taken out again below."""
    count = max(map(len, RELEASES.values()))
    if count > 1:
        names = [f"release{number}" for number in range(count)]
        metafunc.parametrize("release", range(count), ids=names, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a server that is not here, before anything is made for it."""
    for item in list(items):
        kinds = [kind for kind in SERVERS if item.get_closest_marker(kind) is not None]
        for kind in kinds:
            # The first test of a kind waits until its server is up.
            item.add_marker(pytest.mark.timeout(600))
            if not RELEASES[kind]:
                item.add_marker(pytest.mark.skip(f"{VARIABLES[kind]} names no interpreter"))
        number = getattr(item, "callspec", None) and item.callspec.params.get("release", 0)
        if number and all(number >= len(RELEASES[kind]) for kind in kinds):
            items.remove(item)


@pytest.fixture(scope="session", autouse=True)
def release(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has servers started with one of the releases that are named."""
    number = getattr(request, "param", 0)
    with pytest.MonkeyPatch.context() as patch:
        for kind, paths in RELEASES.items():
            if number < len(paths):
                patch.setenv(VARIABLES[kind], paths[number])
        yield


def _llama(**fields: Any) -> LlamaConfig:
    usual: dict[str, Any] = {
        "vocab_size": 14,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        # The least that servers' attention knows on a CPU.
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**usual | fields)


def _write_tokenizer(folder: Path) -> None:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: 3 + i for i, c in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def _hang_bell(model: Any, *, rings: bool) -> None:
    """Have the first axis of the hidden state say whether all is `BELL` or nothing is.

    Nothing but the embedding of a token writes to it. So a generation that ends at `BELL` goes on
    for as long as a test wants, whatever the load of the machine, and ends when the bell rings.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.model.embed_tokens.weight[BELL, 0] = -4.0
        model.model.norm.weight[0] = -8.0 if rings else 8.0


class TinyModel:
    """One architecture on disk; weights by seed, as Hugging Face computes them."""

    def __init__(self, folder: Path, config: Any, model_class: type[PreTrainedModel]) -> None:
        self.folder = folder
        self._config = config
        self._class = model_class
        folder.mkdir()
        self.reference(0).save_pretrained(folder)
        _write_tokenizer(folder)

    def reference(self, seed: int, *, rings: bool | None = None) -> Any:
        """Return a model of a seed; with a bell, unless `rings` is None."""
        torch.manual_seed(seed)
        model: Any = self._class(self._config).eval()
        if rings is not None:
            _hang_bell(model, rings=rings)
        return model

    def bits(self, seed: int, *, rings: bool | None = None) -> Mapping[str, np.ndarray]:
        """u32 bits by checkpoint name, the tied head left out."""
        return {
            name: parameter.detach().numpy().copy().view(np.uint32)
            for name, parameter in self.reference(seed, rings=rings).named_parameters()
        }

    def update(self, version: int, *, seed: int, rings: bool | None = None) -> WeightUpdate:
        bits = self.bits(seed, rings=rings)
        tensors = tuple(dense(name, array) for name, array in bits.items())
        return WeightUpdate(policy_id=POLICY, version=version, base_version=None, tensors=tensors)

    def adapted(self, tensors: Mapping[str, np.ndarray], *, scale: float) -> Any:
        """The model with adapters added to its weights, in float64."""
        module = self.reference(0).double()
        for name, layer in module.named_modules():
            parts = [f"base_model.model.{name}.lora_{part}.weight" for part in "AB"]
            if parts[0] in tensors:
                first, second = (torch.from_numpy(tensors[part]).double() for part in parts)
                layer.weight.data += scale * second @ first
        return module

    def sparse(
        self, version: int, *, base: int, every: int = 16, rings: bool | None = None
    ) -> WeightUpdate:
        """Return an update of a few elements of each tensor, to those of the seed `version`."""
        whole = self.update(version, seed=version, rings=rings)
        parts: list[TensorUpdate] = []
        for part in whole.tensors:
            indices = np.arange(version, part.spec.element_count, every)
            parts.append(replace(part, indices=indices, values=part.values[indices]))
        return replace(whole, base_version=base, tensors=tuple(parts))

    def merged(self, versions: Sequence[int]) -> WeightUpdate:
        """Return all weights that sparse updates of seed 0 lead to, as the last of the versions."""
        bits = {name: array.reshape(-1).copy() for name, array in self.bits(0).items()}
        for version in versions:
            for part in self.sparse(version, base=0).tensors:
                bits[part.spec.name][part.indices] = part.values
        whole = self.update(versions[-1], seed=0)
        parts = tuple(replace(part, values=bits[part.spec.name]) for part in whole.tensors)
        return replace(whole, tensors=parts)

    def logprobs(
        self, seed: int, prompt: list[int], tokens: np.ndarray, *, rings: bool | None = None
    ) -> np.ndarray:
        """Log-probabilities of a completion, the whole sequence in one pass."""
        ids = torch.tensor([[*prompt, *tokens.tolist()]])
        with torch.no_grad():
            logits = self.reference(seed, rings=rings)(ids).logits[0, len(prompt) - 1 : -1].float()
        logits[:, :2] = -torch.inf
        rows = torch.log_softmax(logits, dim=-1)
        return rows[torch.arange(len(tokens)), torch.tensor(tokens).long()].numpy()


def dense(name: str, bits: np.ndarray, dtype: Dtype = Dtype.F32) -> TensorUpdate:
    spec = TensorSpec(name=name, dtype=dtype, shape=bits.shape, offset=0)
    return TensorUpdate(spec=spec, indices=None, values=bits.reshape(-1))


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., TinyModel]:
    def make(
        config: Any = None, model_class: type[PreTrainedModel] = LlamaForCausalLM, **fields: Any
    ) -> TinyModel:
        return TinyModel(tmp_path / "model", config or _llama(**fields), model_class)

    return make


@pytest.fixture
def model(make_model: Callable[..., TinyModel]) -> TinyModel:
    return make_model()


@pytest.fixture
async def why_not(model: TinyModel) -> AsyncIterator[Callable[..., Awaitable[AstraflowError]]]:
    """Makes engines of the tiny model, and returns why no version goes live in them."""
    engines: list[Engine] = []

    async def why_not(**settings: Any) -> AstraflowError:
        engine = build_engine(model.folder, EngineSettings(**settings), POLICY)
        engines.append(engine)
        with pytest.raises(AstraflowError) as caught:
            await engine.swap(model.update(0, seed=0))
        return caught.value

    yield why_not
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="session")
def server_url(
    release: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., str]]:
    """Returns where a server of a kind is, of the tiny model; it is started when first asked for.

    ASTRAFLOW_VLLM_URL and ASTRAFLOW_SGLANG_URL name one without adapters that runs already.
    """
    with ExitStack() as stack:

        @cache
        def url(kind: str, adapters: AdapterLimits | None = None) -> str:
            found = os.environ.get(f"ASTRAFLOW_{kind.upper()}_URL")
            if found and adapters is None:
                return found
            folder = tmp_path_factory.mktemp(kind)
            model = TinyModel(folder / "model", _llama(**LONG), LlamaForCausalLM)
            settings = EngineSettings(kind=kind, device="cpu")
            return stack.enter_context(running_server(settings, model.folder, adapters=adapters))

        yield url


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The same with room for generations that last longer than an update takes; it is read only."""
    folder = tmp_path_factory.mktemp("long") / "model"
    return TinyModel(folder, _llama(**LONG), LlamaForCausalLM)


@contextmanager
def running_server(
    settings: EngineSettings, model_dir: Path, *, adapters: AdapterLimits | None = None
) -> Generator[str]:
    """Start a server that `raas.engine.url` can name; it ends with the body."""
    dialect, model, port = (
        dialect_of(settings),
        ModelDescription.read(model_dir, settings.max_context),
        free_port(),
    )
    folder = ExchangeFolder(f"test-{dialect.name}")
    place = ServerSetup(
        model_dir=model_dir,
        port=port,
        folder=folder.path,
        settings=settings,
        max_context=model.max_context,
        adapters=adapters,
    )
    launch = dialect.launch(place)
    with (model_dir.parent / "server.log").open("wb") as log:
        process = subprocess.Popen(
            kept_command(launch),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment(launch),
            # What ends a run of tests by its group does not end the keeper before its server.
            start_new_session=True,
        )
    try:
        asyncio.run(_until_alive(dialect, f"http://127.0.0.1:{port}", process))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.communicate()
        folder.close()


async def _until_alive(dialect: Dialect, url: str, process: "subprocess.Popen[bytes]") -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while not await _answers(dialect, http):
            if process.poll() is not None:
                raise ChildProcessError(f"the server ended with code {process.returncode}")
            await asyncio.sleep(0.5)


async def _answers(dialect: Dialect, http: httpx.AsyncClient) -> bool:
    try:
        return await dialect.is_alive(http)
    except httpx.HTTPError:
        return False
