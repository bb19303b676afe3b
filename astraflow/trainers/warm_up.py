"""Warm-up: a small model, made on first use by supervised steps on what a tutor writes."""

import hashlib
import json
from pathlib import Path
from typing import cast

import numpy as np

from astraflow.config.recipe import Model, WarmUp
from astraflow.workflows.building import build_tutor
from astraflow.workflows.tutors import Tutor

# Pairs that stand for a tutor in the key of the cache.
_KEY_PAIR_COUNT = 64


def ensure_model(model: Model, *, seed: int, cache_dir: Path) -> Path:
    """Return the directory of a policy's first weights; make it when it is not there yet.

    Args:
        model: A path, or how to warm a model up.
        seed: Of the run; another seed is another model.
        cache_dir: Where models that were made are kept.

    Raises:
        AstraflowError: CODE_UNKNOWN or INVALID_FIELD for a tutor that is not there, or not
            with these options.
    """
    if model.path is not None:
        return model.path
    settings = cast("WarmUp", model.warm_up)
    tutor = build_tutor(settings.tutor, settings.options)
    name = settings.tutor.replace(":", "-")
    target = cache_dir / "warm_up" / f"{name}-{warm_up_key(settings, tutor, seed=seed)}"
    if not target.is_dir():
        from astraflow.trainers.supervised import make_model  # noqa: PLC0415 - loads torch

        make_model(settings, tutor, seed=seed, target=target)
    return target


def warm_up_key(settings: WarmUp, tutor: Tutor, *, seed: int) -> str:
    """Return what tells one warm-up from every other: settings, seed, tutor, model and code.

    The tutor is known by the pairs that it writes, so a change anywhere behind it counts.
    """
    rng = np.random.default_rng(seed)
    pairs = [tutor.pair(rng) for _ in range(_KEY_PAIR_COUNT)]
    content = {
        "settings": settings.model_dump(mode="json"),
        "seed": seed,
        "alphabet": tutor.alphabet,
        "config": tutor.model_config(),
        "pairs": [[pair.prompt, pair.completion] for pair in pairs],
        "code": [_source_digest(name) for name in ("warm_up.py", "supervised.py")],
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _source_digest(name: str) -> str:
    return hashlib.blake2b(Path(__file__).with_name(name).read_bytes(), digest_size=8).hexdigest()
