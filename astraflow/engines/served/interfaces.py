"""Private interfaces of inference servers that our plugins use, looked for before a start.

A release that lacks one would end at its start, or at its first new version, and be started again
and again. The sources are read, not imported: that takes a second, and no GPU.
"""

import ast
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from astraflow.config.extras import install_server
from astraflow.core.errors import AstraflowError, Reason

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Interface:
    """A function, class, field or constant of a release.

    Attributes:
        file: In the package.
        name: Such as Class.method; or a string that the file has, in quotes.
        parameters: That a function takes; more may have defaults.
    """

    file: str
    name: str
    parameters: tuple[str, ...] = ()


_VLLM_RELOAD: Final = "model_executor/model_loader/reload/layerwise.py"
_VLLM_ENGINE: Final = "v1/engine/async_llm.py"
_SGLANG_SCHEDULER: Final = "srt/managers/scheduler.py"
_SGLANG_MESSAGES: Final = "srt/managers/io_struct.py"
_SGLANG_HOOKS: Final = "srt/plugins/hook_registry.py"

# What was tried; other releases are taken too, if they lack nothing.
TRIED: Final[Mapping[str, str]] = {"vllm": "0.32 or 0.33", "sglang": "0.5.21 to 0.5.23"}

INTERFACES: Final[Mapping[str, Sequence[Interface]]] = {
    "vllm": (
        Interface("_custom_ops.py", "_supports_onednn"),
        Interface(_VLLM_RELOAD, "initialize_layerwise_reload", ("model",)),
        Interface(_VLLM_RELOAD, "finalize_layerwise_reload"),
        Interface(
            "v1/engine/core_client.py",
            "AsyncMPClient.pause_scheduler_async",
            ("mode", "clear_cache"),
        ),
        Interface(_VLLM_ENGINE, "AsyncLLM.collective_rpc", ("method", "args")),
        Interface(_VLLM_ENGINE, "AsyncLLM.reset_prefix_cache", ("reset_running_requests",)),
        Interface(_VLLM_ENGINE, "AsyncLLM.update_weight_version", ("new_version",)),
        Interface(_VLLM_ENGINE, "AsyncLLM.resume_generation"),
        Interface("engine/arg_utils.py", '"--worker-extension-cls"'),
        Interface("outputs.py", "CompletionOutput.weight_versions"),
        Interface(
            "entrypoints/scale_out/token_in_token_out/api_router.py", '"/inference/v1/generate"'
        ),
    ),
    "sglang": (
        Interface(_SGLANG_HOOKS, "HookRegistry.register", ("target", "hook", "hook_type")),
        Interface(_SGLANG_HOOKS, "HookType.AROUND"),
        Interface(_SGLANG_HOOKS, "HookType.REPLACE"),
        Interface(_SGLANG_SCHEDULER, "Scheduler.handle_update_weight_version", ("recv_req",)),
        Interface(_SGLANG_SCHEDULER, "Scheduler.pause_generation", ("recv_req",)),
        Interface(_SGLANG_SCHEDULER, "Scheduler.process_batch_result", ("batch", "result")),
        Interface("srt/managers/schedule_batch.py", "ScheduleBatch.copy"),
        Interface("srt/model_executor/forward_batch_info.py", "ForwardMode.IDLE"),
        Interface(_SGLANG_MESSAGES, "PauseGenerationReqInput.mode"),
        Interface(_SGLANG_MESSAGES, "UpdateWeightVersionReqInput.new_version"),
        Interface(_SGLANG_MESSAGES, "UpdateWeightVersionReqOutput"),
        Interface("srt/entrypoints/http_server.py", '"/begin_weight_update"'),
        Interface("srt/configs/model_config.py", "ModelConfig._get_hf_eos_token_id"),
        Interface("srt/arg_groups/fields/model.py", "Model.custom_weight_loader"),
        Interface("srt/utils/weight_versions.py", "compute_weight_version_spans"),
    ),
}

_FIND: Final = """
import importlib.metadata as metadata, importlib.util as util, json, sys
spec = util.find_spec(sys.argv[1])
release = ""
for name in (sys.argv[1], sys.argv[1] + "-cpu"):
    try:
        release = release or metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
places = list(spec.submodule_search_locations or ()) if spec else []
print(json.dumps({"folder": places[0] if places else None, "release": release}))
"""

_FIND_S: Final = 60.0


def require_interfaces(kind: str, python: Path) -> None:
    """Reject an environment whose server is missing, or has other interfaces than we use.

    Raises:
        AstraflowError: CAPABILITY_MISSING that names the release and what is not as it should be.
    """
    command = (str(python), "-c", _FIND, kind)
    try:
        done = subprocess.run(  # noqa: S603 - the recipe's own interpreter
            command, capture_output=True, text=True, check=True, timeout=_FIND_S, cwd="/"
        )
        found: Mapping[str, str | None] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise _unfit(f"{python} is no interpreter that works: {error}") from error
    folder = found["folder"]
    if folder is None:
        raise _unfit(
            f"the environment of {python} has no package {kind}: {install_server(kind, python)}"
        )
    release = f"{kind} {found['release'] or 'of an unknown release'}"
    missing = list(missing_interfaces(Path(folder), INTERFACES[kind]))
    if missing:
        raise _unfit(
            f"{release} in {folder} does not have {', '.join(missing)}, which new weights come by;"
            f" take {TRIED[kind]}: {install_server(kind, python)}"
        )
    log.info("the server has the interfaces that are used", release=release)


def missing_interfaces(package: Path, interfaces: Sequence[Interface]) -> Iterator[str]:
    """Yield what a release, in its folder, lacks or has otherwise."""
    sources: dict[str, str | None] = {}
    for each in interfaces:
        if each.file not in sources:
            path = package / each.file
            sources[each.file] = path.read_text(errors="replace") if path.is_file() else None
        source = sources[each.file]
        if source is None:
            yield f"{each.file} ({each.name})"
        elif each.name.startswith('"'):
            if each.name not in source:
                yield f"{each.name} in {each.file}"
        else:
            yield from _difference(source, each)


def _difference(source: str, interface: Interface) -> Iterator[str]:
    """Yield what is not as it should be of a definition; a module that cannot be read has none."""
    try:
        body: Sequence[ast.stmt] = ast.parse(source).body
    except SyntaxError:
        body = ()
    found: ast.stmt | None = None
    for part in interface.name.split("."):
        found = next((each for each in _flat(body) if _defines(each, part)), None)
        body = found.body if isinstance(found, ast.ClassDef) else ()
    where = f"{interface.name} in {interface.file}"
    if found is None:
        yield where
    elif isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = found.args
        names = {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}
        strange = [each for each in interface.parameters if each not in names]
        if strange and arguments.kwarg is None and arguments.vararg is None:
            yield f"{where} with {', '.join(strange)}"


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those of branches and guards of the same scope with them."""
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            yield from _flat([*each.body, *each.orelse])


def _defines(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return statement.name == name
        case ast.AnnAssign(target=ast.Name(id=found)):
            return found == name
        case ast.Assign(targets=targets):
            return any(isinstance(each, ast.Name) and each.id == name for each in targets)
        case _:
            return False


def _unfit(message: str) -> AstraflowError:
    return AstraflowError(Reason.CAPABILITY_MISSING, f"raas.engine.python: {message}")
