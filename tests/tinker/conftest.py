"""A tiny model, a server on a real socket, and a peer that speaks to it without the SDK."""

import asyncio
import itertools
import json
import math
import os
import sys
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow.config.pool import EngineSettings
from astraflow.tinker.app import serving
from astraflow.tinker.learner import TinkerSettings
from astraflow_proto.tinker.v1 import tinker_pb2 as pb

NAME = "Qwen/Qwen3-4B-Instruct-2507"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL)
PAD, START, END = range(256, VOCABULARY)
# By their tokens: what bytes look like in the tokenizer's file.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PROTOBUF = "application/x-protobuf"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def write_tokenizer(folder):
    """Write a tokenizer whose tokens are bytes, and the three that chats of Qwen are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    model = models.BPE(vocab={letter: index for index, letter in enumerate(LETTERS)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def tiny_module(seed=0, **fields):
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "pad_token_id": PAD,
            "bos_token_id": START,
            "eos_token_id": END,
            **fields,
        }
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tokenizer(folder)
    tiny_module().save_pretrained(folder)
    return folder


@pytest.fixture
def settings(model_dir, tmp_path):
    return TinkerSettings(
        model_dir=model_dir,
        base_model=NAME,
        listen="127.0.0.1:0",
        directory=tmp_path / "checkpoints",
        engine=EngineSettings(device="cpu"),
        max_rank=8,
        max_tokens_per_pass=256,
    )


@pytest.fixture
def make_settings(settings):
    return lambda **changes: replace(settings, **changes)


@pytest.fixture
async def peer(settings):
    async with serving(settings) as address, Peer(address) as peer:
        yield peer


@pytest.fixture
async def model(peer):
    return await peer.create_model(rank=4)


def arguments_of(settings):
    """Return the arguments of the `astraflow` command that serves."""
    return (
        *("tinker", "--json", "--listen", "127.0.0.1:0"),
        *("--model", str(settings.model_dir), "--name", settings.base_model),
        *("--dir", str(settings.directory), "--max-rank", str(settings.max_rank)),
    )


@asynccontextmanager
async def process(settings, *options):
    """Start a server of its own process; yield it and its address."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "astraflow", *arguments_of(settings), *options),
        stdout=PIPE,
        env=os.environ | {"no_proxy": "*"},
    )
    try:
        told = await started.stdout.readline()
        yield started, json.loads(told)["address"]
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


class RefusedError(Exception):
    """A result that is an error."""

    def __init__(self, answer):
        super().__init__(answer["error"])
        self.category = answer["category"]


class Peer:
    """Speaks as the SDK does: JSON and protobuf, futures and polls."""

    def __init__(self, address, key="tml-test"):
        self.http = httpx.AsyncClient(
            base_url=f"http://{address}/api/v1/",
            headers={"X-API-Key": key},
            timeout=100,
            trust_env=False,
            # To read the certificates of all authorities takes longer than most tests.
            verify=False,
        )

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.http.aclose()

    async def post(self, path, /, **fields):
        """Return the fields of an answer that is none of an error."""
        answer = await self.http.post(path, json=fields)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    async def result(self, told):
        """Return what a request came to: fields, or the bytes of a message."""
        while True:
            answer = await self.http.post(
                "retrieve_future", json={"request_id": told["request_id"]}
            )
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == PROTOBUF:
                return answer.content
            fields = answer.json()
            if "error" in fields:
                raise RefusedError(fields)
            if fields.get("type") != "try_again":
                return fields

    async def done(self, path, /, **fields):
        return await self.result(await self.post(path, **fields))

    async def create_model(self, **lora):
        session = await self.post("create_session", tags=[], sdk_version="0")
        fields = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": NAME}
        told = await self.done("create_model", **fields, lora_config=lora)
        return ClientModel(self, session["session_id"], told["model_id"])

    async def restored(self, path, *, optimizer=True):
        session = await self.post("create_session")
        fields = {"session_id": session["session_id"], "model_seq_id": 0, "path": path}
        told = await self.done("load_weights", **fields, optimizer=optimizer)
        return ClientModel(self, session["session_id"], told["model_id"])

    async def sampler(self, path=None):
        session = await self.post("create_session")
        source = {"base_model": NAME} if path is None else {"model_path": path}
        told = await self.post(
            "create_sampling_session",
            session_id=session["session_id"],
            sampling_session_seq_id=0,
            **source,
        )
        return SamplingSession(self, told["sampling_session_id"])


class ClientModel:
    """A model that is trained, with the count of its requests."""

    def __init__(self, peer, session_id, model_id):
        self.peer = peer
        self.session_id = session_id
        self.model_id = model_id
        self.seq_id = 0
        self.sampler_count = 0

    def next(self):
        self.seq_id += 1
        return {"model_id": self.model_id, "seq_id": self.seq_id}

    def message(self, data, loss_fn="cross_entropy", *, forward_only=False, **settings):
        return pb.ForwardBackwardRequest(
            **self.next(),
            data=data,
            loss_fn=loss_fn,
            forward_only=forward_only,
            loss_settings={name: pb.LossSetting(number=each) for name, each in settings.items()},
        )

    async def send(self, message):
        answer = await self.peer.http.post(
            "forward_backward",
            content=message.SerializeToString(),
            headers={"content-type": PROTOBUF},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def forward_backward(self, data, loss_fn="cross_entropy", **options):
        """Return the log-probabilities of each datum's targets, and the metrics."""
        told = await self.send(self.message(data, loss_fn, **options))
        return read_output(await self.peer.result(told))

    async def optim_step(self, **adam):
        return await self.peer.done("optim_step", **self.next(), adam_params=adam)

    async def save(self, name, **options):
        told = await self.peer.done("save_weights", **self.next(), path=name, **options)
        return told["path"]

    async def save_for_sampler(self, name, **options):
        fields = {**self.next(), "path": name, **options}
        return (await self.peer.done("save_weights_for_sampler", **fields))["path"]

    async def sampler(self):
        self.sampler_count += 1
        told = await self.peer.done(
            "save_weights_for_sampler",
            **self.next(),
            sampling_session_seq_id=self.sampler_count,
            kind="snapshot",
        )
        return SamplingSession(self.peer, told["sampling_session_id"])


class SamplingSession:
    """A sampling session."""

    def __init__(self, peer, sampler_id):
        self.peer = peer
        self.sampler_id = sampler_id
        self.seq_id = -1

    async def ask(self, prompt, *, num_samples=1, stop=None, seed=0, **options):
        self.seq_id += 1
        named = ("max_tokens", "temperature", "top_k", "top_p")
        sampling = {name: options.pop(name) for name in named if name in options}
        return await self.peer.post(
            "asample",
            sampling_session_id=self.sampler_id,
            seq_id=self.seq_id,
            num_samples=num_samples,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params={"max_tokens": 8, "seed": seed, "stop": stop, **sampling},
            **options,
        )

    async def sample(self, prompt, **options):
        """Return the answer, as a message."""
        told = await self.ask(prompt, **options)
        assert len(told["sample_sequence_ids"]) == options.get("num_samples", 1)
        return pb.SampleResponse.FromString(await self.peer.result(told))


def tensor(values):
    array = np.asarray(values)
    is_whole = array.dtype.kind in "iu"
    return pb.Tensor(
        dense=array.astype("<i8" if is_whole else "<f4").tobytes(),
        element_type=pb.ELEMENT_TYPE_I64 if is_whole else pb.ELEMENT_TYPE_F32,
        shape=array.shape,
    )


def datum(tokens, **inputs):
    chunk = pb.Chunk(encoded_text=pb.EncodedText(tokens=np.asarray(tokens, "<i4").tobytes()))
    return pb.Datum(
        model_input=[chunk],
        loss_fn_inputs={name: tensor(each) for name, each in inputs.items()},
    )


def made_data(count, *, seed=0, most=20, width=None):
    """Return inputs for every loss: rows of tokens, targets, weights, logprobs, advantages."""
    chance = np.random.default_rng(seed)
    rows = []
    for length in chance.integers(1, most, count):
        shape = (length,) if width is None else (length, width)
        advantages = chance.normal(0, 0.1, shape).astype(np.float32)
        advantages[0] = 0
        rows.append(
            {
                "tokens": chance.integers(0, VOCABULARY, length),
                "target_tokens": chance.integers(0, VOCABULARY, shape),
                "weights": chance.normal(0, 0.1, shape).astype(np.float32),
                "logprobs": -chance.gamma(4, 1, shape).astype(np.float32),
                "advantages": advantages,
            }
        )
    return rows


def to_data(rows, *names):
    return [
        datum(row["tokens"], target_tokens=row["target_tokens"], **{n: row[n] for n in names})
        for row in rows
    ]


def read_output(body):
    message = pb.ForwardBackwardOutput.FromString(body)
    found = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        values = np.frombuffer(field.data, "<f4")
        ends = np.frombuffer(field.offsets, "<i8") // 4
        assert len(ends) == record.num_datums + 1
        for start, end in itertools.pairwise(ends):
            width = math.prod(field.trailing_shape)
            found.append(values[start:end].reshape((end - start) // width, *field.trailing_shape))
    assert all(name.count(":") == 1 for name in message.metrics)
    return found, dict(message.metrics)


def sampled(message):
    """Return tokens and log-probabilities of each completion."""
    return [
        (np.frombuffer(one.tokens, "<i4").tolist(), np.frombuffer(one.logprobs, "<f4"))
        for one in message.sequences
    ]
