"""vLLM's own words: its command line, its HTTP routes and its answers."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import Grammar
from astraflow.engines.checks import apply_failed, engine_failed
from astraflow.engines.devices import is_on_cpu
from astraflow.engines.protocol import EngineLoad, Likeliest
from astraflow.engines.served.dialect import (
    ENDS,
    NO_END,
    AdapterLimits,
    CompletionPiece,
    ServerCommand,
    ServerRequest,
    ServerSetup,
)
from astraflow.engines.served.routed_experts import from_npy

# What it knows (vllm.config.lora, release 0.32).
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def adapter_options(room: AdapterLimits | None) -> tuple[str, ...]:
    """Return what a server's command line says of adapters; None: there are none.

    What is unloaded is held on to for as long again: a request that was withdrawn may be a step
    behind.

    Raises:
        AstraflowError: INVALID_FIELD for a rank that it does not know.
    """
    if room is None:
        return ()
    rank = next((known for known in _RANKS if known >= room.rank), None)
    if rank is None:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model.lora.rank {room.rank} is more than vLLM's {_RANKS[-1]}: take a lower one",
        )
    said = {"max-loras": room.count, "max-cpu-loras": 2 * room.count, "max-lora-rank": rank}
    options = (word for name, value in said.items() for word in (f"--{name}", str(value)))
    return ("--enable-lora", *options)


# What it tells of a token whose log-probability is not finite.
_NO_LOGPROB = -9999.0


def piece_of(choice: Mapping[str, Any], *, top_count: int = 0) -> CompletionPiece:
    """Return what one choice of an answer holds.

    Raises:
        AstraflowError: ENGINE_FAILED for one that ended in a way of its own.
    """
    spans = choice["weight_versions"] or ()
    logprobs: Mapping[str, Any] = choice["logprobs"] or {}
    content: Sequence[Mapping[str, Any]] = logprobs.get("content") or ()
    reason = choice.get("finish_reason")
    if reason is not None and reason not in ENDS:
        raise engine_failed(f"vLLM: a completion ended by {reason}")
    return CompletionPiece(
        tokens=choice["token_ids"] or (),
        logprobs=[_logprob(said["logprob"]) for said in content],
        versions=[
            (int(said["version"]), said["end"] - said["start"])
            for said in spans
            if said["version"].isdecimal()
        ],
        finish_reason=None if reason is None else ENDS[reason],
        likeliest=[_likeliest(said["top_logprobs"], top_count) for said in content]
        if top_count
        else (),
        experts=from_npy(choice.get("routed_experts")),
    )


def _logprob(said: float | None) -> float:
    return math.nan if said is None or said <= _NO_LOGPROB else said


def _likeliest(said: Sequence[Mapping[str, Any]], count: int) -> Likeliest:
    """Return the likeliest tokens; the one that was sampled is told too, before them."""
    pairs = [(int(each["token"].removeprefix("token_id:")), each["logprob"]) for each in said]
    finite = [pair for pair in pairs if pair[1] > _NO_LOGPROB]
    return sorted(finite, key=lambda pair: -pair[1])[:count]


def event_of(line: str) -> Any:
    """Return what a line of a stream says.

    Raises:
        AstraflowError: ENGINE_FAILED for an error.
    """
    said = json.loads(line.removeprefix("data: "))
    if "error" in said:
        raise engine_failed(f"vLLM: {said['error']}")
    return said


def gauge(page: str, name: str) -> float:
    """Return the sum over all engines of one family of a Prometheus page."""
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


_MODEL = "policy"

# A logit bias that no softmax in float32 survives.
_NEVER = -100.0

_GENERATE = "/inference/v1/generate"

_CHANGE = "/astraflow/change"

_ONE_TOKEN = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}

# It draws by a seed of the request's own, and takes back what it drew at the end of a part of a
# prompt; torch's generator for CPUs cannot, and the server would end. So prompts are read whole.
_ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")

_POLL_S = 0.002

_POLL_LIMIT_S = 0.05

_BAD_REQUEST = 400

_ERROR_LENGTH = 500


class VllmDialect:
    """Speaks with vLLM's server in its development mode."""

    name = "vllm"
    kv_policies = frozenset((KvPolicy.KEEP, KvPolicy.RECOMPUTE))

    def __init__(self, python: Path) -> None:
        self._python = python
        self.report: Mapping[str, Any] = {}

    def launch(self, place: ServerSetup) -> ServerCommand:
        settings = place.settings
        return ServerCommand(
            argv=(
                str(self._python),
                "-m",
                "vllm.entrypoints.openai.api_server",
                *_options(place),
                *adapter_options(place.adapters),
                *(_ON_CPU if is_on_cpu(settings) else ()),
                *(("--enable-return-routed-experts",) if settings.routed_experts else ()),
                *settings.args,
            ),
            env={
                "PYTHONPATH": str(place.folder / "python"),
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.cache_gib))),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(settings.thread_count),
                "HF_HUB_OFFLINE": "1",
                # Adapters come while it runs.
                **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if place.adapters else {}),
            },
        )

    async def is_alive(self, http: httpx.AsyncClient) -> bool:
        answer = await http.post(_GENERATE, json={**_ONE_TOKEN, "model": _MODEL})
        return answer.is_success

    async def generate(
        self, http: httpx.AsyncClient, request: ServerRequest
    ) -> AsyncGenerator[CompletionPiece]:
        top_count = request.sampling.top_logprobs
        body = {
            "model": request.adapter or _MODEL,
            "request_id": request.request_id,
            "token_ids": list(request.prompt),
            "sampling_params": sampling_body(request),
            "cache_salt": request.cache_salt,
            "stream": request.is_streamed,
        }
        if not request.is_streamed:
            answer = await _request_json(http, "POST", _GENERATE, json=body, timeout=NO_END)
            yield piece_of(answer["choices"][0], top_count=top_count)
            return
        async with http.stream("POST", _GENERATE, json=body, timeout=NO_END) as answer:
            await _require_success(answer)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in event_of(line)["choices"]:
                        yield piece_of(choice, top_count=top_count)

    async def abort(self, http: httpx.AsyncClient, request_id: str) -> None:
        said = {"request_ids": [request_id]}
        await _request_json(http, "POST", "/inference/v1/abort_requests", json=said)

    async def stage(self, http: httpx.AsyncClient, file: Path) -> None:
        """Have each worker look up what it will write, in a thread beside generation."""
        await _call(http, "astraflow_stage", str(file))
        pause_s = _POLL_S
        while True:
            for said in await _call(http, "astraflow_staged", str(file)):
                if said["error"]:
                    raise apply_failed(said["error"])
                if not said["is_staged"]:
                    break
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_LIMIT_S)

    async def change(
        self, http: httpx.AsyncClient, file: Path, *, version: int, kv: KvPolicy
    ) -> None:
        """Write what was staged while nothing decodes: one call of a route of ours."""
        said = {
            "path": str(file),
            "version": str(version),
            "forget_running": kv is KvPolicy.RECOMPUTE,
        }
        reports = (await _request_json(http, "POST", _CHANGE, json=said))["reports"]
        self.report = max(reports, key=lambda each: each["apply_s"])

    async def served_model(self, http: httpx.AsyncClient) -> tuple[Path, int | None]:
        said: list[dict[str, Any]] = (await _request_json(http, "GET", "/v1/models"))["data"]
        ours = next((model for model in said if model["id"] == _MODEL), None)
        if ours is None:
            names = ", ".join(str(model["id"]) for model in said)
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"it serves {names}, not {_MODEL}: start it with the command line that is in the"
                " log of a node that starts its own",
            )
        return Path(ours["root"]), ours["max_model_len"]

    async def wake(self, http: httpx.AsyncClient) -> None:
        await _request_json(http, "POST", "/resume")

    async def checksums(self, http: httpx.AsyncClient) -> Mapping[str, str]:
        """Return SHA-256 by runtime parameter."""
        said = await _request_json(http, "POST", "/weight_checker", json={"action": "checksum"})
        return said["checksums"]

    async def load(self, http: httpx.AsyncClient) -> EngineLoad:
        """Read its Prometheus page."""
        page = (await http.get("/metrics")).text
        return EngineLoad(
            running_count=int(gauge(page, "vllm:num_requests_running")),
            queued_count=int(gauge(page, "vllm:num_requests_waiting")),
            kv_fraction=gauge(page, "vllm:kv_cache_usage_perc"),
            sampled_token_count=int(gauge(page, "vllm:generation_tokens_total")),
        )

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path) -> None:
        said = {"lora_name": name, "lora_path": str(folder)}
        await _require_success(await http.post("/v1/load_lora_adapter", json=said))

    async def unload_adapter(self, http: httpx.AsyncClient, name: str) -> None:
        """Forget the name of an adapter; its place is that of the next one."""
        said = {"lora_name": name}
        await _require_success(await http.post("/v1/unload_lora_adapter", json=said))


def _options(place: ServerSetup) -> tuple[str, ...]:
    settings, has_weights = place.settings, any(place.model_dir.glob("*.safetensors"))
    said = {
        "model": place.model_dir,
        "served-model-name": _MODEL,
        "host": "127.0.0.1",
        "port": place.port,
        "dtype": place.dtype_name,
        "max-model-len": place.max_context,
        "max-num-seqs": settings.max_batch,
        # 20 of the likeliest tokens, as agents may ask for, and the one that was sampled.
        "max-logprobs": 21,
        "tensor-parallel-size": settings.tensor_parallel,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "load-format": "auto" if has_weights else "dummy",
        "worker-extension-cls": "astraflow_plugins.vllm_worker.AstraflowWorker",
        "middleware": "astraflow_plugins.vllm_routes.UpdateRoute",
        "gpu-memory-utilization": settings.memory,
        # One process less between a request and the model.
        "distributed-executor-backend": "uni" if settings.tensor_parallel == 1 else None,
    }
    pairs = [(f"--{name}", str(value)) for name, value in said.items() if value is not None]
    # Tokens in, tokens out: without a tokenizer nothing is missed.
    bare = () if (place.model_dir / "tokenizer.json").is_file() else ("--skip-tokenizer-init",)
    switches = ("--enable-scale-out", "--disable-uvicorn-access-log", *bare)
    return (*(word for pair in pairs for word in pair), *switches)


def sampling_body(request: ServerRequest) -> dict[str, Any]:
    """Return vLLM's sampling parameters; end tokens are told one by one."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": min(sampling.min_new_tokens, sampling.max_new_tokens),
        "stop_token_ids": list(request.stop_ids),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "logit_bias": {str(token): _NEVER for token in request.never_sampled} or None,
        "ignore_eos": True,
        # The one that was sampled is told first, and counts.
        "logprobs": sampling.top_logprobs + 1 if sampling.top_logprobs else 0,
        "structured_outputs": None if sampling.grammar is None else _structure(sampling.grammar),
        "detokenize": False,
    }


def _structure(grammar: Grammar) -> dict[str, str]:
    """Return a grammar as vLLM has it; JSON or a tool call as a structural tag of xgrammar."""
    if grammar.answer is not None and grammar.call is None:
        return {"json": grammar.answer}
    ways: list[dict[str, Any]] = []
    if grammar.answer is not None:
        ways.append({"type": "json_schema", "json_schema": json.loads(grammar.answer)})
    if grammar.call is not None:
        content = {"type": "json_schema", "json_schema": json.loads(grammar.call)}
        tags = {"begin": "<tool_call>\n", "end": "\n</tool_call>"}
        ways.append({"type": "tag", **tags, "content": content})
    shape = ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": shape})}


async def _call(http: httpx.AsyncClient, method: str, *args: str) -> Sequence[Mapping[str, Any]]:
    """Call a method of every worker."""
    body = {"method": method, "args": list(args)}
    return (await _request_json(http, "POST", "/collective_rpc", json=body))["results"]


async def _request_json(http: httpx.AsyncClient, method: str, path: str, **said: Any) -> Any:
    answer = await http.request(method, path, **said)
    await _require_success(answer)
    return answer.json() if answer.content else None


async def _require_success(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    said = (await answer.aread()).decode(errors="replace")[:_ERROR_LENGTH]
    reason = Reason.INVALID_FIELD if answer.status_code == _BAD_REQUEST else Reason.ENGINE_FAILED
    raise AstraflowError(
        reason, f"vLLM answered {answer.status_code} to {answer.request.url.path}: {said}"
    )
