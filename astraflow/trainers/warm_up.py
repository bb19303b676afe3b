"""Warm-up: the model that a policy starts from, made on first use by supervised steps."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from astraflow.config.recipe import ModelConfig, WarmUp
from astraflow.engines.models import given_model
from astraflow.storage.cache import must_be_writable
from astraflow.workflows.building import build_tutor
from astraflow.workflows.tutors import Tutor

# Pairs that stand for a tutor in the key of the cache.
_KEY_PAIR_COUNT = 64
_CODE = ("warm_up.py", "supervised.py", "demonstrations.py")


def ensure_model(
    model: ModelConfig,
    *,
    seed: int,
    cache_dir: Path,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the directory of a policy's first weights; make it when it is not there yet.

    Another seed is another model.

    Raises:
        AstraflowError: CODE_UNKNOWN or INVALID_FIELD for a tutor that is not there, or not
            with these options; INVALID_FIELD for demonstrations that cannot be learned from;
            CAPACITY_EXCEEDED for a cache that cannot be written; what `given_model` raises.
    """
    base = given_model(model, report=report)
    settings = model.warm_up
    if settings is None:
        assert base is not None, "the recipe's schema lets nothing else through"  # noqa: S101
        return base
    if settings.tutor is not None:
        tutor = build_tutor(settings.tutor, settings.options)
        name = settings.tutor.replace(":", "-")
        target = cache_dir / "warm_up" / f"{name}-{warm_up_key(settings, tutor, seed=seed)}"
        if not target.is_dir():
            must_be_writable(target.parent)
            from astraflow.trainers.supervised import make_tutored  # noqa: PLC0415 - loads torch

            make_tutored(settings, tutor, seed=seed, target=target, report=report)
        return target
    key = demonstrated_key(model, base, seed=seed)
    target = cache_dir / "warm_up" / f"{base.name if base else 'tiny'}-{key}"
    if not target.is_dir():
        must_be_writable(target.parent)
        from astraflow.trainers.supervised import make_demonstrated  # noqa: PLC0415 - loads torch

        make_demonstrated(model, base, seed=seed, target=target, report=report)
    return target


def warm_up_key(settings: WarmUp, tutor: Tutor, *, seed: int) -> str:
    """Return what tells one warm-up by a tutor from every other: settings, seed, model and code.

    The tutor is known by the pairs that it writes, so a change anywhere behind it counts.
    """
    rng = np.random.default_rng(seed)
    pairs = [tutor.pair(rng) for _ in range(_KEY_PAIR_COUNT)]
    return _key(
        settings,
        seed,
        {
            "alphabet": tutor.alphabet,
            "config": tutor.model_config(),
            "pairs": [[pair.prompt, pair.completion] for pair in pairs],
        },
    )


def demonstrated_key(model: ModelConfig, base: Path | None, *, seed: int) -> str:
    """Return what tells one warm-up by demonstrations from every other.

    Files count by their content: the demonstrations, and those of the model.

    Raises:
        AstraflowError: INVALID_FIELD when the demonstrations cannot be read.
    """
    from astraflow.trainers.demonstrations import read_demonstrations  # noqa: PLC0415

    settings = model.warm_up
    assert settings is not None  # noqa: S101 - whoever asks has looked
    assert settings.demonstrations is not None  # noqa: S101
    read_demonstrations(settings.demonstrations)
    files = sorted(path for path in base.iterdir() if path.is_file()) if base else []
    return _key(
        settings.model_copy(update={"demonstrations": None}),
        seed,
        {
            "demonstrations": _digest(settings.demonstrations),
            "model": [[path.name, _digest(path)] for path in files],
            "tiny": model.tiny and model.tiny.model_dump(mode="json"),
        },
    )


def _key(settings: WarmUp, seed: int, content: dict[str, Any]) -> str:
    code = [_digest(Path(__file__).with_name(name)) for name in _CODE]
    whole = {"settings": settings.model_dump(mode="json"), "seed": seed, "code": code, **content}
    text = json.dumps(whole, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
