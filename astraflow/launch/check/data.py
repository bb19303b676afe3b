"""Data sets: there, readable, with ids that name rows, and not measured on what is trained on."""

import json
from dataclasses import replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from astraflow.config.extras import install
from astraflow.config.recipe import DataSet
from astraflow.core.errors import AstraflowError
from astraflow.launch.check.subject import RowKind, SeenData, Subject
from astraflow.workflows.data_sets import DataSetReader, kept_data_set, open_data_set

_MAX_KINDS = 8


def check_data_sets(subject: Subject) -> None:
    """Read every data set as the hub does, and every row once more for what it says."""
    recipe = subject.recipe
    used = {*recipe.rollouts.data_sets}
    used |= {part.data_set for suite in recipe.evals.values() for part in suite.data_sets}
    for name, settings in recipe.data.items():
        where = f"data.{name}"
        here = _here(where, settings, subject)
        if here is None:
            continue
        try:
            reader = open_data_set(name, here, Path(), seed=recipe.seed)
        except AstraflowError as refused:
            subject.refused(where, refused)
            continue
        if not len(reader):
            if reader.row_count:
                subject.error(
                    f"{where}.max_prompt_chars",
                    f"all {reader.row_count} rows are longer",
                    "raise it, or name the field that counts in length_field",
                )
            else:
                subject.error(f"{where}.path", "there are no rows in it", "one JSON object a line")
            continue
        subject.data[name] = _seen(reader)
        if name not in used:
            subject.warning(where, "is not used", "name it in rollouts or evals, or leave it out")


def _here(where: str, settings: DataSet, subject: Subject) -> DataSet | None:
    """Return the settings of what is on this machine; None: nothing is, or not yet."""
    if settings.hub is None:
        if settings.path is None or settings.path.exists():
            return settings
        subject.error_here(
            f"{where}.path",
            f"{settings.path} does not exist",
            f"relative paths start at {subject.source.parent}",
        )
        return None
    if find_spec("datasets") is None:
        cure = install("datasets")
        subject.error_here(f"{where}.hub", "the package datasets is not installed", cure)
        return None
    kept = kept_data_set(settings)
    if kept is None:
        what = f"{settings.hub} is not in the cache: it is got when the run starts"
        subject.note(f"{where}.hub", f"{what}; until then nothing of it is looked at")
        return None
    return settings.model_copy(update={"hub": None, "path": kept, "format": "datasets"})


def check_held_out(subject: Subject) -> None:
    """Compare what is measured on with what is trained on."""
    trained = subject.recipe.rollouts.data_sets
    for suite, settings in subject.recipe.evals.items():
        for index, part in enumerate(settings.data_sets):
            held_out = subject.data.get(part.data_set)
            where = f"evals.{suite}.data_sets.{index}.data_set"
            if part.data_set in trained:
                subject.warning(where, f"{part.data_set} is trained on, too", "hold rows out")
                continue
            for name in trained:
                train = subject.data.get(name)
                if held_out is None or train is None:
                    continue
                # A seed says nothing by itself: an environment of other options makes another task.
                seeds = subject.recipe.data[part.data_set].seeds
                if seeds is not None and part.workflow != subject.recipe.rollouts.workflow:
                    continue
                shared = len(held_out.digests & train.digests)
                if shared:
                    subject.warning(
                        where,
                        f"{shared} of {len(held_out.digests)} rows of {part.data_set} are in "
                        f"{name}, too",
                        "what is trained on measures nothing: take them out of one",
                    )


def _seen(reader: DataSetReader) -> SeenData:
    """Look at every row: its kind, its length and its digest."""
    kinds: dict[tuple[tuple[str, str], ...], RowKind] = {}
    lengths: list[int] = []
    digests: set[bytes] = set()
    id_field = reader.id_field
    for index, prompt in enumerate(reader):
        fields = prompt.fields
        key = tuple((name, type(value).__name__) for name, value in sorted(fields.items()))
        known = kinds.get(key, RowKind(prompt=prompt, row_number=index + 1, count=0))
        kinds[key] = replace(known, count=known.count + 1)
        said = {name: value for name, value in fields.items() if name != id_field}
        blobs = {name: blob.hex() for name, blob in prompt.blobs.items()}
        text = json.dumps([said, blobs], sort_keys=True, ensure_ascii=False)
        lengths.append(len(text))
        digests.add(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())
    return SeenData(
        reader=reader,
        kinds=sorted(kinds.values(), key=lambda kind: -kind.count)[:_MAX_KINDS],
        longest=sorted(range(len(lengths)), key=lambda index: -lengths[index]),
        digests=frozenset(digests),
    )
