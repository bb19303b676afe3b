"""`astraflow tinker`: train and sample for clients of Tinker's API."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from astraflow.cli import options as opt
from astraflow.core.errors import AstraflowError, Reason


def tinker(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_DIR",
            help="A Hugging Face directory, or a name of `astraflow models ls`.",
            show_default=False,
        ),
    ],
    *,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call it, such as Qwen/Qwen3-8B; unset: as --model has it."),
    ] = None,
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = (
        "127.0.0.1:8000"
    ),
    directory: Annotated[
        Path, typer.Option("--dir", help="Folder that keeps checkpoints; it outlives the server.")
    ] = Path("runs/tinker"),
    engine: Annotated[
        Literal["embedded", "vllm", "sglang"],
        typer.Option(help="That samples; vllm and sglang serve adapters only."),
    ] = "embedded",
    engine_python: Annotated[
        Path | None,
        typer.Option(help="Interpreter that has vllm or sglang; unset: as docs/engines.md says."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")] = "auto",
    dtype: Annotated[
        Literal["f32", "bf16"], typer.Option(help="Sampling is computed in; training in f32.")
    ] = "f32",
    max_rank: Annotated[
        int, typer.Option(min=1, max=512, help="Largest rank of an adapter; memory grows with it.")
    ] = 32,
    max_batch: Annotated[int, typer.Option(min=1, help="Completions sampled together.")] = 128,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; unset: the model's own limit.")
    ] = None,
    max_tokens_per_pass: Annotated[
        int, typer.Option(min=1, help="Tokens of one forward and backward pass.")
    ] = 16384,
    thread_count: Annotated[
        int, typer.Option("--threads", min=1, help="CPU threads: of training, and of sampling.")
    ] = 1,
    http_token: Annotated[
        str,
        typer.Option(
            help="Key that clients show, TINKER_API_KEY for them; it begins with tml-. Unset: any "
            "key will do.",
            envvar="ASTRAFLOW_HTTP_TOKEN",
            show_default=False,
        ),
    ] = "",
    as_json: opt.AsJson = False,
    tls_certificate: opt.CertificateFile = None,
    tls_key: opt.KeyFile = None,
    tls_ca: opt.CaFile = None,
) -> None:
    """Train and sample for programs that are written for Tinker's SDK.

    They need a base_url and a key: TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local.
    docs/tinker.md runs two recipes of Tinker's cookbook so. The server ends at SIGTERM; what was
    saved is there when it starts again.
    """
    from astraflow.cli.roles import tls_of  # noqa: PLC0415
    from astraflow.config.pool import EngineSettings  # noqa: PLC0415
    from astraflow.tinker.app import main_tinker  # noqa: PLC0415 - torch
    from astraflow.tinker.learner import TinkerSettings  # noqa: PLC0415

    settings = TinkerSettings(
        model_dir=_directory_of(model),
        base_model=name or model,
        listen=listen,
        directory=directory,
        engine=EngineSettings(
            kind=engine,
            python=engine_python,
            device=device,
            dtype=dtype,
            max_batch=max_batch,
            max_context=max_context,
            thread_count=thread_count,
        ),
        max_rank=max_rank,
        max_tokens_per_pass=max_tokens_per_pass,
        token=http_token,
        tls=tls_of(tls_certificate, tls_key, tls_ca),
    )
    raise typer.Exit(main_tinker(settings, as_json=as_json))


def _directory_of(model: str) -> Path:
    from astraflow.engines.models import find_model  # noqa: PLC0415

    directory = Path(model)
    if directory.is_dir():
        return directory.resolve()
    found = find_model(model)
    if found is None:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"--model {model}: get it first: astraflow models get {model}"
        )
    return found
