"""Models: complete, with a tokenizer and a template that fit, and room for prompt and answer."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from astraflow.config.extras import install
from astraflow.config.recipe import Lora, ModelConfig, PolicyConfig, WarmUp
from astraflow.core.errors import AstraflowError
from astraflow.engines.hub import kept_model
from astraflow.engines.models import find_model, must_be_model
from astraflow.launch.check.subject import SeenModel, Subject
from astraflow.workflows.agents.template import ChatTemplate, load_template
from astraflow.workflows.building import build_tutor
from astraflow.workflows.tutors import BOS_ID, EOS_ID, PAD_ID, character_tokenizer

_COPY = "copy the directory again, with all its files"
# Rows of a file of demonstrations that are turned into tokens.
_MAX_DEMONSTRATIONS = 200
_LATER = "it is got when the run starts; until then nothing of it is looked at"
_LFS = b"version https://git-lfs"


def check_models(subject: Subject) -> None:
    """Read what there is beside the weights, and of these the headers."""
    for name, policy in subject.recipe.policies.items():
        where = f"policies.{name}.model"
        with TemporaryDirectory(prefix="astraflow-check-") as scratch:
            model = _seen(where, policy.model, Path(scratch), subject)
        if model is None:
            continue
        subject.models[name] = model
        _context_faults(name, policy, model, subject)
    _reference_faults(subject)


def _seen(where: str, model: ModelConfig, scratch: Path, subject: Subject) -> SeenModel | None:
    """Look at a model and at what it is warmed up with; None: too little of it can be read."""
    if find_spec("tokenizers") is None:
        return None  # check_packages says so
    warm_up = model.warm_up
    if warm_up is not None and warm_up.tutor is not None:
        return _of_tutor(warm_up, warm_up.tutor, subject)
    if warm_up is not None and warm_up.demonstrations is not None:
        return _demonstrated(where, model, warm_up, scratch, subject)
    place, directory = _directory(subject, where, model)
    if directory is None:
        return None
    return _read(place, directory, where, model, subject)


def _demonstrated(
    where: str, model: ModelConfig, warm_up: WarmUp, scratch: Path, subject: Subject
) -> SeenModel | None:
    """Look at a model and at its demonstrations; the tokenizer of a tiny one is made of them."""
    from astraflow.trainers.demonstrations import (  # noqa: PLC0415 - the package takes its time
        read_demonstrations,
        tiny_config,
        tokenize_demonstrations,
        write_tiny_tokenizer,
    )

    rows: Sequence[Mapping[str, Any]] = ()
    told = f"{where}.warm_up.demonstrations"
    try:
        rows = read_demonstrations(cast("Path", warm_up.demonstrations))[:_MAX_DEMONSTRATIONS]
    except AstraflowError as refused:
        subject.refused(told, refused, is_local=True)
    if model.tiny is None:
        place, directory = _directory(subject, where, model)
    elif rows:
        place, directory = f"{where}.tiny", scratch
        size = write_tiny_tokenizer(directory, model.tiny, rows)
        config = tiny_config(model.tiny, vocabulary_size=size)
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    else:
        return None
    if directory is None:
        return None
    seen = _read(place, directory, where, model, subject)
    if seen is not None and rows:
        try:
            tokenize_demonstrations(rows, directory, max_length=warm_up.max_length)
        except AstraflowError as refused:
            subject.refused(told, refused, is_local=True)
    return seen


def _directory(subject: Subject, where: str, model: ModelConfig) -> tuple[str, Path | None]:
    """Return the key that names a model, and its directory; None: it is not here, or not yet."""
    if model.name is not None:
        place, found = f"{where}.name", None
        try:
            found = find_model(model.name)
        except AstraflowError as refused:
            subject.refused(place, refused, is_local=True)
        else:
            if found is None:
                cure = f"astraflow models get {model.name}"
                subject.note(place, f"{model.name} is not here yet: {_LATER}", cure)
        return place, found
    if model.hub is not None:
        place, found = f"{where}.hub", None
        if find_spec("huggingface_hub") is None:
            subject.error_here(place, "huggingface_hub is not installed", install("torch"))
        elif (found := kept_model(model.hub, model.revision)) is None:
            subject.note(place, f"{model.hub} is not in the cache: {_LATER}")
        return place, found
    place, path = f"{where}.path", cast("Path", model.path)
    if path.is_dir():
        return place, path
    if path.suffix == ".gguf":
        _gguf_faults(subject, place, path)
    else:
        cure = "give that of a Hugging Face model: config.json, tokenizer.json, *.safetensors"
        subject.error_here(place, f"{path} is not a directory", cure)
    return place, None


def _gguf_faults(subject: Subject, place: str, path: Path) -> None:
    if not path.is_file():
        subject.error_here(place, f"{path} does not exist", "give a .gguf file, or a directory")
        return
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            subject.error_here(place, f"{path} is no GGUF file", "get it again")
            return
    if find_spec("gguf") is None:
        subject.error_here(place, "the package gguf is not installed", install("models"))
    what = "it is converted when the run starts; until then nothing of it is looked at"
    subject.note(place, what, f"astraflow models get {path}")


def _read(
    place: str, directory: Path, where: str, model: ModelConfig, subject: Subject
) -> SeenModel | None:
    """Read a Hugging Face directory; None: too little of it can be read."""
    from astraflow.engines.tokenizer import load_tokenizer  # noqa: PLC0415 - an extra

    tensors: Mapping[str, tuple[int, ...]] = {}
    if model.tiny is None:
        try:
            must_be_model(directory, where=place)
        except AstraflowError as refused:
            subject.refused(place, refused, is_local=True)
            return None
        tensors = _tensors(subject, place, directory)
    config = _config(subject, place, directory)
    if config is None:
        return None
    try:
        tokenizer = load_tokenizer(directory)
    except AstraflowError as refused:
        subject.refused(place, refused, is_local=True)
        return None
    vocab_size = int(config["vocab_size"])
    if tokenizer.vocab_size > vocab_size:
        subject.error_here(
            place,
            f"the tokenizer has {tokenizer.vocab_size} tokens, config.json a vocab_size of "
            f"{vocab_size}",
            "tokenizer.json is of another model, or tokens were added: resize the embeddings",
        )
    eos = sorted(tokenizer.special_ids.eos)
    if not eos:
        subject.warning_here(
            place,
            "no end token is named: every generation goes on to max_new_tokens",
            "set eos_token_id in generation_config.json",
        )
    template = ChatTemplate()
    try:
        template = load_template(
            directory, chat_template=model.chat_template, variables=model.chat_template_kwargs
        )
        # One that does not show what a user says is at fault.
        _ = template.check
    except AstraflowError as refused:
        template = ChatTemplate()
        named = f"{where}.chat_template" if model.chat_template is not None else place
        subject.refused(named, refused, is_local=True)
    except (OSError, ValueError, KeyError, TypeError) as refused:
        subject.error_here(place, f"tokenizer_config.json cannot be read: {refused}", _COPY)
    _lora_faults(subject, f"{where}.lora.targets", model.lora, tensors)
    return SeenModel(
        config=config,
        tokenizer=tokenizer,
        eos_ids=eos,
        template=template,
        max_context=subject.recipe.raas.engine.max_context or config.get("max_position_embeddings"),
        parameter_count=sum(map(prod, tensors.values())),
    )


def _of_tutor(warm_up: WarmUp, name: str, subject: Subject) -> SeenModel | None:
    """Return the model that a tutor is going to make; None: `check_tutors` says why not."""
    from astraflow.engines.tokenizer import FastTokenizer, SpecialIds  # noqa: PLC0415 - an extra

    try:
        tutor = build_tutor(name, warm_up.options)
        config, made = tutor.model_config(), character_tokenizer(tutor.alphabet)
    except Exception:  # noqa: BLE001 - code of a user raises anything; it was told already
        return None
    special = SpecialIds(eos=frozenset((EOS_ID,)), never_sampled=frozenset((PAD_ID, BOS_ID)))
    return SeenModel(
        config=config,
        tokenizer=FastTokenizer(made, special),
        eos_ids=(EOS_ID,),
        template=ChatTemplate(),
        max_context=subject.recipe.raas.engine.max_context or config.get("max_position_embeddings"),
    )


def _config(subject: Subject, where: str, directory: Path) -> Mapping[str, Any] | None:
    """Read `config.json`, its text part before the rest."""
    path = directory / "config.json"
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as refused:
        subject.error_here(where, f"{path.name} cannot be read: {refused}", _COPY)
        return None
    config = cast("dict[str, Any]", said if isinstance(said, dict) else {})
    config = {**config, **config.get("text_config", {})}
    missing = [
        key
        for key in ("vocab_size", "max_position_embeddings")
        if not isinstance(config.get(key), int)
    ]
    if missing:
        subject.error_here(
            where,
            f"config.json has no {' and no '.join(missing)}",
            "a causal language model of transformers has both",
        )
        return None
    return config


def _tensors(subject: Subject, where: str, directory: Path) -> Mapping[str, tuple[int, ...]]:
    """Read the headers of the weights: every file is there, and as long as it says."""
    index = directory / "model.safetensors.index.json"
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if index.is_file():
        try:
            files: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as refused:
            subject.error_here(where, f"{index.name} cannot be read: {refused}", _COPY)
            files = set()
        missing = sorted(files - set(names))
        if missing:
            subject.error_here(
                where,
                f"{len(missing)} of {len(files)} files of weights are missing, such as "
                f"{missing[0]}",
                _COPY,
            )
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        try:
            shapes |= _shapes(directory / name)
        except (OSError, ValueError, KeyError, TypeError) as refused:
            subject.error_here(where, f"{name} is no sound file of weights: {refused}", _COPY)
    return shapes


def _shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Read one header: its length in 8 bytes, JSON, and behind it as many bytes as that says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if _LFS.startswith(start):
            raise ValueError("it is a pointer of Git LFS; run git lfs pull")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size:
            raise ValueError(f"it is cut off at {size} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = 8 + length + max((said["data_offsets"][1] for said in header.values()), default=0)
    if size < end:
        raise ValueError(f"it has {size} of {end} bytes")
    return {name: tuple(said["shape"]) for name, said in header.items()}


def _lora_faults(
    subject: Subject, where: str, lora: Lora | None, tensors: Mapping[str, tuple[int, ...]]
) -> None:
    linear = {
        name.split(".")[-2]
        for name, shape in tensors.items()
        if name.endswith(".weight") and len(shape) == 2 and name.count(".") > 1
    }
    unknown = [target for target in (lora.targets if lora else ()) if target not in linear]
    if unknown and linear:
        subject.error_here(
            where,
            f"the model has no layer {', '.join(unknown)}",
            f"it has {', '.join(sorted(linear))}",
        )


def _context_faults(name: str, policy: PolicyConfig, model: SeenModel, subject: Subject) -> None:
    asked = subject.recipe.raas.engine.max_context
    own = model.config.get("max_position_embeddings")
    if asked is not None and own is not None and asked > own:
        subject.error(
            "raas.engine.max_context",
            f"{asked} is more than the {own} of the model of {name}",
            "lower it, or leave it out",
        )
    limit, answer = model.max_context, policy.sampling.max_new_tokens
    is_sampled = subject.recipe.raas.engine.kind != "none"
    if is_sampled and limit is not None and answer >= limit:
        subject.error(
            f"policies.{name}.sampling.max_new_tokens",
            f"{answer} leaves no room for a prompt in a context of {limit}",
            "lower it, or raise raas.engine.max_context as far as the model goes",
        )
    texts = policy.sampling.stop_strings
    if not all(texts):
        subject.error(
            f"policies.{name}.sampling.stop_strings", "an empty text stops nothing", "leave it out"
        )
    overlong = policy.trainer.advantages.overlong
    if overlong is not None and overlong.max_tokens - overlong.buffer_tokens >= answer:
        subject.warning(
            f"policies.{name}.trainer.advantages.overlong",
            f"begins after {overlong.max_tokens - overlong.buffer_tokens} tokens, and an answer "
            f"has {answer} at most",
            "lower max_tokens, or leave it out",
        )


def _reference_faults(subject: Subject) -> None:
    """Look whether what a policy is kept near to, or learns from, has its vocabulary."""
    for name, policy in subject.recipe.policies.items():
        kl = policy.trainer.loss.kl
        if kl is None or kl.reference is None:
            continue
        where = f"policies.{name}.trainer.loss.kl.reference"
        if not (kl.reference / "config.json").is_file():
            subject.error_here(
                where, f"{kl.reference} has no config.json", "give a Hugging Face directory"
            )
            continue
        config = _config(subject, where, kl.reference)
        own = subject.models.get(name)
        if config is not None and own is not None:
            sizes = config["vocab_size"], own.config["vocab_size"]
            if sizes[0] != sizes[1]:
                subject.error_here(
                    where,
                    f"it has a vocabulary of {sizes[0]} tokens, the policy one of {sizes[1]}",
                    "take a model of the same tokenizer",
                )
