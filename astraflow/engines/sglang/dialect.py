"""SGLang's HTTP API, as an engine needs it: what it is asked for, and what it answers."""

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from astraflow.config.model_dirs import read_config
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.engines.checks import apply_failed, engine_failed
from astraflow.engines.devices import is_on_cpu
from astraflow.engines.protocol import EngineLoad
from astraflow.engines.served.dialect import (
    ENDS,
    NO_END,
    AdapterLimits,
    CompletionPiece,
    ServerCommand,
    ServerRequest,
    ServerSetup,
)
from astraflow.engines.served.interfaces import TRIED
from astraflow.engines.served.routed_experts import from_i32

_NEVER = -1e9


def generate_body(request: ServerRequest) -> dict[str, Any]:
    """Return the body of `/generate`.

    Raises:
        AstraflowError: INVALID_FIELD for a knob that the server cannot honour.
    """
    _check_supported(request.sampling)
    return {
        "input_ids": list(request.prompt),
        "sampling_params": _sampling(request),
        "rid": request.request_id,
        "return_logprob": True,
        "top_logprobs_num": request.sampling.top_logprobs,
        "stream": request.is_streamed,
        "extra_key": request.cache_salt,
        "return_routed_experts": request.tells_experts,
        "lora_path": request.adapter,
    }


def until_least(request: ServerRequest) -> ServerRequest:
    """Return the part of a completion in which nothing may end it.

    The server's own `min_new_tokens` needs a tokenizer, and it is asked with ids alone.

    Raises:
        AstraflowError: INVALID_FIELD where the part that follows would forget what penalties count.
    """
    sampling = request.sampling
    count = min(sampling.min_new_tokens, sampling.max_new_tokens)
    penalties = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
    if count < sampling.max_new_tokens:
        for name, none in penalties.items():
            if getattr(sampling, name) != none:
                raise _refused(name, "beside min_new_tokens it would begin anew in the middle")
    return replace(
        request,
        sampling=replace(sampling, max_new_tokens=count),
        stop_ids=(),
        never_sampled=(*request.never_sampled, *request.stop_ids),
    )


def after_least(request: ServerRequest, tokens: Sequence[int]) -> ServerRequest:
    """Return the part of a completion that follows on some tokens of it."""
    left = request.sampling.max_new_tokens - len(tokens)
    return replace(
        request,
        prompt=(*request.prompt, *tokens),
        sampling=replace(request.sampling, max_new_tokens=left, min_new_tokens=0),
    )


def _sampling(request: ServerRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": not request.stop_ids,
        "logit_bias": {str(token): _NEVER for token in request.never_sampled} or None,
    }


def _check_supported(sampling: SamplingParams) -> None:
    """Refuse what would be done silently in another way."""
    truncated = {
        "top_p": sampling.top_p < 1,
        "top_k": sampling.top_k is not None,
        "min_p": sampling.min_p > 0,
    }
    for name, is_set in truncated.items():
        if is_set and sampling.temperature > 0:
            raise _refused(name, "its log-probabilities would be those before the cut")
    if sampling.grammar is not None:
        raise _refused("grammar", "it is asked with ids alone and reads no tokenizer; take vLLM")


def _refused(name: str, why: str) -> AstraflowError:
    return AstraflowError(
        Reason.INVALID_FIELD,
        f"sampling.{name} cannot be honoured by SGLang: {why}",
        metadata={"field": f"sampling.{name}"},
    )


def piece_of(answer: dict[str, Any], *, is_adapted: bool = False) -> CompletionPiece:
    """Return an answer of `/generate`, which in a stream holds what is new.

    Only the last answer has the versions, of all tokens. Those before name the live one, which may
    be newer or older than their tokens: they tell none.

    Args:
        answer: Of the route.
        is_adapted: Whether it is of an adapter: it says nothing of the version of that.

    Raises:
        AstraflowError: ENGINE_FAILED for weights of no version.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    spans = () if is_adapted else meta.get("weight_versions") or ()
    return CompletionPiece(
        tokens=answer["output_ids"],
        logprobs=[value for value, *_ in meta["output_token_logprobs"]],
        versions=[
            (_version_number(span["version"]), span["end"] - span["start"]) for span in spans
        ],
        finish_reason=None if reason is None else ENDS[reason["type"]],
        likeliest=[
            [(token, logprob) for logprob, token, *_ in said or ()]
            for said in meta.get("output_top_logprobs") or ()
        ],
        experts=from_i32(meta.get("routed_experts")),
    )


def _version_number(said: str) -> int:
    if not said.isdecimal():
        raise AstraflowError(
            Reason.ENGINE_FAILED, f"SGLang sampled with weights of no version: it says {said!r}"
        )
    return int(said)


def adapter_options(room: AdapterLimits | None, *, is_on_cpu: bool) -> tuple[str, ...]:
    """Return what a server's command line says of adapters; None: there are none.

    A request of the model alone, as its health page makes, takes a place as well.

    Raises:
        AstraflowError: CAPABILITY_MISSING on a CPU: it keeps adapters in pinned memory, which
            torch has not without an accelerator.
    """
    if room is None:
        return ()
    if is_on_cpu:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            "SGLang reads adapters into pinned memory, which there is none of without a GPU: on a"
            " CPU take raas.engine.kind vllm or embedded, or leave out model.lora",
        )
    return (
        *("--enable-lora", "--max-loras-per-batch", str(room.count + 1)),
        *("--max-lora-rank", str(room.rank), "--lora-target-modules", *room.targets),
    )


_LOADER = "astraflow_plugins.sglang_plugin.load"

_ITEMSIZES = {"f32": 4, "bf16": 2}

_STUBS = Path(__file__).with_name("cpu_stubs")

# A server that lost a process would answer nobody for a minute or two while it writes them.
_NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}

# Its entry point has the server run `astraflow_plugins.sglang_plugin`.
_PLUGIN = Path(__file__).with_name("plugin")

# The node says what ends a completion. A server that knows end tokens of its own ignores them
# only together with those that it is told.
_NO_END_IDS = json.dumps({"eos_token_id": None})


def _cache_token_count(place: ServerSetup) -> int:
    """Return for how many tokens the cache has room: twice what the places can fill at most."""
    config = read_config(place.model_dir)
    heads: int = config["num_attention_heads"]
    width: int = config.get("head_dim") or config["hidden_size"] // heads
    kept = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    nbytes = place.settings.cache_gib * 2**30
    wanted = 2 * place.settings.max_batch * place.max_context
    return min(wanted, int(nbytes / (kept * _ITEMSIZES[place.dtype])))


_ERROR_LENGTH = 500

_MODES = {KvPolicy.KEEP: "in_place", KvPolicy.RECOMPUTE: "retract"}


class SglangDialect:
    """One server of SGLang; its prefix cache need not be emptied, as salts keep versions apart."""

    name = "sglang"
    kv_policies = frozenset(_MODES)

    def __init__(self, python: Path) -> None:
        self._python = python
        self.report: Mapping[str, Any] = {}
        self._checked: httpx.AsyncClient | None = None
        self._is_quick = False
        self._rank_count = 1

    def launch(self, place: ServerSetup) -> ServerCommand:
        settings, is_cpu = place.settings, is_on_cpu(place.settings)
        folders = [str(place.folder / "python"), str(_PLUGIN)]
        env = {"HF_HUB_OFFLINE": "1", **_NO_DUMPS}
        device = ()
        if is_cpu:
            folders.append(str(_STUBS))
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(settings.thread_count)}
            # It is kept to torch's own kernels.
            device = (
                *("--device", "cpu", "--attention-backend", "torch_native"),
                *("--sampling-backend", "pytorch", "--disable-cuda-graph"),
                *("--max-total-tokens", str(_cache_token_count(place))),
                *("--mem-fraction-static", "0.3"),
            )
        elif settings.memory is not None:
            device = ("--mem-fraction-static", str(settings.memory))
        argv = (
            *(str(self._python), "-m", "sglang.launch_server"),
            *("--model-path", str(place.model_dir), "--json-model-override-args", _NO_END_IDS),
            *("--host", "127.0.0.1", "--port", str(place.port)),
            *("--dtype", place.dtype_name, "--context-length", str(place.max_context)),
            *("--max-running-requests", str(settings.max_batch), "--skip-tokenizer-init"),
            *("--tensor-parallel-size", str(settings.tensor_parallel)),
            *("--custom-weight-loader", _LOADER),
            *("--sleep-on-idle", "--incremental-streaming-output"),
            *(("--enable-return-routed-experts",) if settings.routed_experts else ()),
            *device,
            *adapter_options(place.adapters, is_on_cpu=is_cpu),
            *settings.args,
        )
        return ServerCommand(argv=argv, env={**env, "PYTHONPATH": os.pathsep.join(folders)})

    async def _look(self, http: httpx.AsyncClient) -> None:
        """Note how many ranks a server has.

        Raises:
            AstraflowError: ENGINE_FAILED for a release that lacks what is needed.
        """
        told = _answer_json(await http.get("/server_info"))
        routes = _answer_json(await http.get("/openapi.json"))["paths"]
        missing = {"/begin_weight_update", "/pause_generation", "/v1/loads"} - routes.keys()
        if missing:
            raise engine_failed(
                f"SGLang {told.get('version')} has no {min(missing)}: take {TRIED['sglang']}"
            )
        self._rank_count = int(told.get("tp_size", 1))

    async def is_alive(self, http: httpx.AsyncClient) -> bool:
        """Return whether it generates a token; one of what runs will do."""
        return (await http.get("/health_generate")).is_success

    async def generate(
        self, http: httpx.AsyncClient, request: ServerRequest
    ) -> AsyncGenerator[CompletionPiece]:
        if request.sampling.min_new_tokens and request.stop_ids:
            first: list[int] = []
            async for piece in self._part(http, until_least(request)):
                first += piece.tokens
                is_over = len(first) == request.sampling.max_new_tokens
                yield piece if is_over else replace(piece, finish_reason=None)
            if len(first) == request.sampling.max_new_tokens:
                return
            request = after_least(request, first)
        async for piece in self._part(http, request):
            yield piece

    async def _part(
        self, http: httpx.AsyncClient, request: ServerRequest
    ) -> AsyncGenerator[CompletionPiece]:
        """Sample one completion, or a part of one that has a length of its own."""
        body = generate_body(request)
        piece = partial(piece_of, is_adapted=request.adapter is not None)
        if not request.is_streamed:
            answer = await http.post("/generate", json=body, timeout=NO_END)
            yield piece(_answer_json(answer))
            return
        async with http.stream("POST", "/generate", json=body, timeout=NO_END) as answer:
            if answer.is_error:
                await answer.aread()
                _answer_json(answer)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield piece(json.loads(line.removeprefix("data: ")))

    async def abort(self, http: httpx.AsyncClient, request_id: str) -> None:
        _ok(await http.post("/abort_request", json={"rid": request_id}))

    async def stage(self, http: httpx.AsyncClient, file: Path) -> None:
        """Have each rank look up what it will write, beside generation.

        By sockets of astraflow's loader, which are there after the first update: the server's own
        routes wait until nothing is generated.
        """
        if self._checked is not http:
            await self._look(http)
            self._checked = http
        for left in file.parent.glob(_answers_to(file)):
            # By an attempt at this version that broke off.
            left.unlink()
        answers = await asyncio.gather(
            *(called(d, str(file)) for d in file.parent.glob("*.socket"))
        )
        heard = [answer for answer in answers if answer is not None]
        failed = [answer["error"] for answer in heard if answer["error"]]
        if failed:
            raise apply_failed(failed[0])
        is_all = len(heard) >= self._rank_count
        self._is_quick = is_all and all(answer["is_quick"] for answer in heard)

    async def change(
        self, http: httpx.AsyncClient, file: Path, *, version: int, kv: KvPolicy
    ) -> None:
        """Write what was staged between two steps; running requests stay.

        Neither way's own answer is a proof: a name that it does not know is a success to it. What
        counts is what the loader wrote beside the file.
        """
        # What is written between two steps needs no pause, unless running requests are read anew.
        is_paused = kv is KvPolicy.RECOMPUTE or not self._is_quick
        if is_paused:
            _ok(await http.post("/pause_generation", json={"mode": _MODES[kv]}))
        if self._is_quick:
            # The plugin writes what is staged for the version that it hears of.
            body = {"new_version": str(version), "abort_all_requests": False}
            _answer_json(await http.post("/update_weight_version", json=body))
        else:
            await self._load(http, file, version)
        answers = _answers_beside(file, rank_count=self._rank_count)
        self.report = max(answers, key=lambda each: each["apply_s"])
        if kv is KvPolicy.RECOMPUTE:
            _ok(await http.post("/flush_cache"))
        if is_paused:
            await self.wake(http)

    async def served_model(self, http: httpx.AsyncClient) -> tuple[Path, int | None]:
        told = _answer_json(await http.get("/server_info"))
        return Path(told["model_path"]), told.get("context_length")

    async def wake(self, http: httpx.AsyncClient) -> None:
        _ok(await http.post("/continue_generation", json={"torch_empty_cache": False}))

    async def _load(self, http: httpx.AsyncClient, file: Path, version: int) -> None:
        """Have the server call the loader: of all servers, and for what they convert."""
        named = base64.b64encode(named_after(str(file))).decode()
        body = {
            "serialized_named_tensors": [named] * self._rank_count,
            "load_format": _LOADER,
            "flush_cache": False,
            "weight_version": str(version),
        }
        if (await http.post("/begin_weight_update", json={})).is_error:
            # A node that ended in the middle left it begun.
            _answer_json(await http.post("/end_weight_update", json={}))
            _answer_json(await http.post("/begin_weight_update", json={}))
        try:
            _answer_json(await http.post("/update_weights_from_tensor", json=body))
        finally:
            _answer_json(await http.post("/end_weight_update", json={}))

    async def checksums(self, http: httpx.AsyncClient) -> Mapping[str, str]:
        ranks = _answer_json(await http.post("/weights_checker", json={"action": "checksum"}))
        return {
            f"{rank}.{name}": checksum
            for rank, told in enumerate(ranks["ranks"])
            for name, checksum in told["checksums"].items()
        }

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path) -> None:
        said = {"lora_name": name, "lora_path": str(folder)}
        _answer_json(await http.post("/load_lora_adapter", json=said))

    async def unload_adapter(self, http: httpx.AsyncClient, name: str) -> None:
        """Forget an adapter, once the server has ended what was withdrawn."""
        _answer_json(await http.post("/unload_lora_adapter", json={"lora_name": name}))

    async def load(self, http: httpx.AsyncClient) -> EngineLoad:
        """Return how busy it is; of several schedulers their sum, and the fullest cache."""
        loads: list[dict[str, Any]] = _answer_json(await http.get("/v1/loads"))["loads"]
        return EngineLoad(
            running_count=sum(each["num_running_reqs"] for each in loads),
            queued_count=sum(each["num_waiting_reqs"] for each in loads),
            kv_fraction=max(each["token_usage"] for each in loads),
        )


def named_after(text: str) -> bytes:
    """Return the pickle of `[(text, torch.FloatTensor(1))]`: the route takes no other form.

    Written by hand, so that the node loads no torch for it; of few names that the server lets in.
    """
    name = text.encode()
    return b"".join(
        (
            b"\x80\x02](X",
            struct.pack("<I", len(name)),
            name,
            b"ctorch\nFloatTensor\n(K\x01tRta.",
        )
    )


async def called(socket: Path, text: str) -> Mapping[str, Any] | None:
    """Say something at a socket, and return what it answers; None where nobody does."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except ConnectionRefusedError:
        return None
    try:
        writer.write(text.encode())
        writer.write_eof()
        answer = await reader.read()
        return json.loads(answer) if answer else None
    except ConnectionResetError:
        return None
    finally:
        writer.close()
        await writer.wait_closed()


def _answers_to(file: Path) -> str:
    return f"{file.name}.*.answer"


def _answers_beside(file: Path, *, rank_count: int) -> Sequence[Mapping[str, Any]]:
    """Return what each rank's loader wrote; see `astraflow.engines.plugins.sglang_plugin`.

    Raises:
        AstraflowError: APPLY_FAILED when one failed, or was not called.
    """
    answers: list[dict[str, Any]] = []
    for path in file.parent.glob(_answers_to(file)):
        answers.append(json.loads(path.read_text()))
        path.unlink()
    failed = [answer["error"] for answer in answers if answer["error"]]
    if failed or len(answers) < rank_count:
        left_out = f"SGLang called astraflow's loader in {len(answers)} of {rank_count} ranks"
        raise apply_failed(failed[0] if failed else left_out)
    return answers


def _ok(answer: httpx.Response) -> None:
    if answer.is_error:
        path, said = answer.request.url.path, answer.text[:_ERROR_LENGTH]
        raise engine_failed(f"SGLang answered {answer.status_code} to {path}: {said}")


def _answer_json(answer: httpx.Response) -> Any:
    """Return what was answered; some routes refuse with a status that says success."""
    _ok(answer)
    told: dict[str, Any] = answer.json()
    if told.get("success") is False:
        why = told.get("message") or told.get("error_message")
        raise engine_failed(f"SGLang refused {answer.request.url.path}: {why}")
    return told
