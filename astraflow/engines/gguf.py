"""GGUF files, as llama.cpp writes them, as Hugging Face directories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from astraflow.core.errors import AstraflowError, Reason


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is cut before byte pairs are merged, by `tokenizer.ggml.pre` (llama-vocab.cpp of
# llama.cpp). transformers cuts all as GPT-2 did, and two line ends before a digit get other tokens.
_CUTS: dict[str, dict[str, Any]] = {
    "smollm": {"type": "Digits", "individual_digits": True},
    "llama-bpe": _split(_WORDS + "{1,3}" + _REST),
    "qwen2": _split(_WORDS + _REST),
}
_AS_GPT2 = frozenset({"gpt-2", "default"})


def convert_gguf(source: Path, target: Path, *, report: Callable[[str], None]) -> None:
    """Write a GGUF file as a Hugging Face directory; quantised weights come out in f32.

    Args:
        source: The file.
        target: An empty directory.
        report: Told what is done, one line each.

    Raises:
        AstraflowError: CAPABILITY_MISSING without the packages that it takes, INVALID_FIELD for a
            file that is damaged or of an architecture that transformers cannot read.
        OSError: The target cannot be written.
    """
    try:
        import accelerate  # noqa: F401, PLC0415 - transformers reads GGUF with both  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]
        import gguf  # pyright: ignore[reportMissingTypeStubs] # noqa: PLC0415
        import torch  # noqa: PLC0415
        from safetensors import SafetensorError  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"reading {source.name} needs {error.name}: pip install 'astraflow[torch,models]'",
        ) from error
    logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        report(f"reading {source.name}")
        fields = cast("Any", gguf).GGUFReader(source).fields
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
    _correct_tokenizer(target, _text(fields, "tokenizer.ggml.pre"), report)


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


def _text(fields: Any, name: str) -> str:
    return str(fields[name].contents()) if name in fields else ""
