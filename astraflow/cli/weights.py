"""`astraflow weights`: what versions there are, and what is in files of weights."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.options import AsJson, RunPath, run_async
from astraflow.config.run_dir import RunDir

PolicyName = Annotated[
    str | None, typer.Option("--policy", help="Which; can be left out when the run has one.")
]
VersionNumber = Annotated[
    int | None, typer.Option("--version", help="Which; left out: the newest.")
]

app = typer.Typer(no_args_is_help=True, help="Look at, pull, verify and compare weights.")


@app.command("ls")
def list_versions(run: RunPath, *, policy: PolicyName = None, as_json: AsJson = False) -> None:
    """List the versions that can be pulled from a run that goes on."""
    from astraflow.launch.weights import show_versions  # noqa: PLC0415

    run_async(show_versions(RunDir(run), policy=policy, as_json=as_json))


@app.command("inspect")
def inspect(
    run: RunPath,
    *,
    policy: PolicyName = None,
    version: VersionNumber = None,
    as_json: AsJson = False,
) -> None:
    """Show one version: its digests, the patches that lead to it, and who has it."""
    from astraflow.launch.weights import show_version  # noqa: PLC0415

    run_async(show_version(RunDir(run), policy=policy, version=version, as_json=as_json))


@app.command("pull")
def pull(
    run: RunPath,
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for model.safetensors.")],
    policy: PolicyName = None,
    version: VersionNumber = None,
    as_json: AsJson = False,
) -> None:
    """Pull a version from its sources, verify it and write it down."""
    from astraflow.launch.weights import pull_version  # noqa: PLC0415
    from astraflow.telemetry.logging import configure_logging  # noqa: PLC0415

    configure_logging("weights")
    run_async(pull_version(RunDir(run), policy=policy, version=version, out=out, as_json=as_json))


@app.command("verify")
def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A safetensors file, a folder of them, or the URL of a version's folder in an"
            " object store.",
        ),
    ],
    *,
    run: Annotated[Path | None, typer.Option("--run", help="Folder of the run.")] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", help="Signing key of the policy; with a URL, and no hub is asked."),
    ] = None,
    policy: PolicyName = None,
    version: Annotated[
        int | None, typer.Option("--version", help="Which it must be; left out: any of the run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that files of weights are sound, and which version of a run they are.

    Of a version in an object store: that a trainer of the run registered it, and all its bytes.
    """
    from astraflow.launch.weights import verify_stored, verify_weights  # noqa: PLC0415

    if "://" in path:
        run_async(verify_stored(path, key=key or "", as_json=as_json))
        return
    run_dir = RunDir(run) if run else None
    run_async(
        verify_weights(Path(path), run_dir=run_dir, policy=policy, version=version, as_json=as_json)
    )


@app.command("diff")
def diff(
    old: Annotated[Path, typer.Argument(metavar="A", help="A safetensors file or a folder.")],
    new: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show which tensors of two models differ, bit by bit, and in how many elements."""
    from astraflow.launch.weights import show_diff  # noqa: PLC0415

    show_diff(old, new, as_json=as_json)
