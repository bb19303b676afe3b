"""This machine: interpreters, ports, certificates, folders, GPUs, memory and disk."""

import os
import shutil
import socket
import ssl
from pathlib import Path

from astraflow.config.policies import ModelConfig
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.engines.building import server_python
from astraflow.engines.devices import Machine, free_memory
from astraflow.launch.autoscale import fill
from astraflow.launch.check.settings import ports_of
from astraflow.launch.check.subject import Subject
from astraflow.launch.executors.finding import LOCAL, Placement
from astraflow.launch.gpus import plan_recipe, trainer_nbytes
from astraflow.launch.run_folder import must_be_dead
from astraflow.rpc.address import is_loopback
from astraflow.storage.cache import cache_dir

_GIB = 1 << 30
# Of a checkpoint: what is published, and master weights with two moments.
_CHECKPOINT_NBYTES = {"bf16": 2 + 12, "f32": 4 + 12}
_SERVED_NBYTES = {"auto": 4, "bf16": 2, "f32": 4}


def check_servers(subject: Subject) -> None:
    """Look for the interpreter of an inference server, without starting it."""
    engine = subject.recipe.raas.engine
    if not engine.is_server or engine.url is not None or not subject.recipe.raas.count:
        return
    where = "raas.engine.python"
    try:
        python = server_python(engine)
    except AstraflowError as refused:
        subject.refused(where, refused, is_local=True)
        return
    if not os.access(python, os.X_OK):
        subject.error_here(
            where, f"{python} cannot be executed", "give an interpreter, such as venv/bin/python"
        )


def check_listening(subject: Subject) -> None:
    """Bind every port of the run for an instant."""
    for key, host, first, count in ports_of(subject.recipe):
        for port in range(first, min(first + count, 1 << 16)):
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                with socket.socket(family) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((host, port))
            except OSError as refused:
                subject.error_here(
                    key,
                    f"{host}:{port} cannot be listened on: {refused.strerror or refused}",
                    "end what holds it, or take another port; 0 takes a free one",
                )
                break


def check_tls(subject: Subject) -> None:
    """Read certificates, and see whether key and certificate are one pair."""
    tls = subject.recipe.hub.tls
    files = {"certificate": tls.certificate, "key": tls.key, "ca": tls.ca}
    missing = False
    for name, path in files.items():
        if path is not None and not os.access(path, os.R_OK):
            missing = True
            subject.error_here(f"hub.tls.{name}", f"{path} cannot be read", "give a PEM file")
    if (tls.certificate is None) != (tls.key is None):
        subject.error_here("hub.tls", "certificate and key go together", "give both, or neither")
        return
    if missing:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key, password="")
    except (ssl.SSLError, ValueError, OSError) as refused:
        what = "the key is not that of the certificate"
        is_pair = "MISMATCH" not in str(refused)
        subject.error_here(
            "hub.tls.key",
            f"certificate and key cannot be used: {refused}" if is_pair else what,
            "give a PEM certificate and its key, without a passphrase",
        )
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError) as refused:
        subject.error_here("hub.tls.ca", f"{tls.ca} is no PEM certificate: {refused}")
    host = subject.recipe.hub.listen.rpartition(":")[0].strip("[]")
    if host and tls.certificate is None and not is_loopback(host):
        subject.warning(
            "hub.tls",
            f"the hub listens on {host} in plain text: tokens can be read on the way",
            "give certificate and key, or listen on 127.0.0.1",
        )


def check_folders(subject: Subject) -> None:
    """Look whether the run can write where it is going to, and whether its name is free."""
    recipe = subject.recipe
    folder = subject.runs / recipe.name
    try:
        must_be_dead(RunDir(folder), "give this one another name with --name")
    except AstraflowError as refused:
        subject.refused("name", refused, is_local=True)
    wanted = {"name": folder}
    if recipe.raas.cache is not None:
        wanted["raas.cache"] = recipe.raas.cache
    if recipe.tracing.exporter == "file" and recipe.tracing.path is not None:
        wanted["tracing.path"] = recipe.tracing.path
    for name, policy in recipe.policies.items():
        store = policy.trainer.store
        if store is not None and store.startswith("file://"):
            wanted[f"policies.{name}.trainer.store"] = Path(store.removeprefix("file://"))
        if _is_made(policy.model) and (why := _fault_of(cache_dir())):
            # Made before, by somebody else, it may be there.
            cure = "point XDG_CACHE_HOME at a folder that you can write"
            subject.warning_here(f"policies.{name}.model", f"the cache: {why}", cure)
    for key, path in wanted.items():
        if why := _fault_of(path):
            cure = "make it writable, or name another folder with --runs" if key == "name" else ""
            subject.error_here(key, why, cure)


def _is_made(model: ModelConfig) -> bool:
    """Whether a model is got or made on first use, and kept in this user's cache."""
    is_gguf = model.path is not None and model.path.suffix == ".gguf"
    return is_gguf or model.name is not None or model.warm_up is not None


def _fault_of(folder: Path) -> str:
    """Return why nothing can be written to a folder, be it still to be made; empty: it can."""
    places = (folder, *folder.absolute().parents)
    above = next(each for each in places if os.access(each, os.F_OK))
    if not above.is_dir():
        return f"{folder} cannot be a folder: {above} is a file"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} cannot be written to"


def check_executor(subject: Subject) -> None:
    """Look for what starts processes on other machines, and whether it can have all of them."""
    if subject.recipe.executor.name == LOCAL:
        return
    folder = RunDir(subject.runs / subject.recipe.name)
    try:
        places = Placement.of(subject.recipe, folder, note=lambda _: None)
        places.preview(folder)
    except AstraflowError as refused:
        place = refused.message.partition(":")[0]
        subject.refused(place if place.startswith("executor") else "executor", refused)


def check_gpus(subject: Subject) -> None:
    """Compare the GPUs that are named with those that are here."""
    recipe, machine = subject.recipe, Machine.here()
    if recipe.executor.name != LOCAL:
        return
    count = len(machine.gpus)
    devices = {
        f"policies.{name}.trainer.device": p.trainer.device for name, p in recipe.policies.items()
    }
    if recipe.raas.count:
        devices["raas.engine.device"] = recipe.raas.engine.device
    for key, device in devices.items():
        kind, _, index = device.partition(":")
        if device not in ("auto", "cpu") and (kind != "cuda" or not (index or "0").isdecimal()):
            subject.error_here(key, f"'{device}' is no device", "take auto, cpu, cuda or cuda:N")
        elif kind == "cuda" and int(index or 0) >= count:
            subject.error_here(key, f"{device} is named, and {_gpus(count)}", "take auto or cpu")
    if recipe.gpus.count and not machine.has_gpus:
        subject.warning_here(
            "gpus.count",
            f"{recipe.gpus.count} GPUs are planned, and {_gpus(0)}: all would run on the CPU",
            "run this recipe where they are",
        )
    sizes = {name: subject.models[name].parameter_count for name in subject.models}
    try:
        plan = plan_recipe(recipe, machine, sizes)
    except AstraflowError as refused:
        subject.refused("gpus", refused, is_local=recipe.gpus.count is None)
        return
    if plan is None:
        _missing_gpus(subject, recipe, count)
        return
    idle = len(plan.free())
    node = plan.share("raas-0")
    if node is not None and idle >= len(node.gpus) and recipe.raas.count == 1:
        subject.note(
            "raas.count",
            f"{idle} GPUs have nothing to do, and a node takes {len(node.gpus)}",
            f"raise it to {1 + idle // len(node.gpus)}",
        )


def _missing_gpus(subject: Subject, recipe: Recipe, count: int) -> None:
    """Name what cannot do without GPUs where none are planned."""
    engine = recipe.raas.engine
    width = engine.tensor_parallel
    is_own = engine.url is None and engine.device != "cpu"
    if recipe.raas.count and width > max(1, count) and is_own:
        subject.error_here(
            "raas.engine.tensor_parallel",
            f"{width} GPUs share a model, and {_gpus(count)}",
            "lower it, or run this recipe where they are",
        )
    for name, policy in recipe.policies.items():
        ranks = policy.trainer.ranks
        if ranks > max(1, count) and policy.trainer.device.startswith("cuda"):
            subject.error_here(
                f"policies.{name}.trainer.ranks",
                f"{ranks} ranks need a GPU each, and {_gpus(count)}",
                "lower it, or run this recipe where they are",
            )


def check_capacity(subject: Subject) -> None:
    """Estimate memory and disk from the number of parameters; activations come on top."""
    recipe = subject.recipe
    sizes = {
        name: subject.models[name].parameter_count
        for name in recipe.policies
        if name in subject.models
    }
    memory = sum(trainer_nbytes(recipe.policies[name], size) for name, size in sizes.items())
    if recipe.raas.engine.kind == "embedded":
        served = _SERVED_NBYTES[recipe.raas.engine.dtype]
        memory += sum(served * size for size in sizes.values()) * recipe.raas.count
    free = free_memory()
    if memory > free and not Machine.here().has_gpus:
        subject.warning_here(
            "policies",
            f"weights, gradients and optimizers take about {memory / _GIB:.1f} GiB, and "
            f"{free / _GIB:.1f} are free",
            "take adapters (model.lora), a smaller model or fewer nodes",
        )
    disk = 0
    for name, size in sizes.items():
        trainer = recipe.policies[name].trainer
        count = 3  # the first weights, and the newest two
        if recipe.policies[name].model.lora is not None:
            count = 0
        elif trainer.save.keep is not None:
            count = 1 + trainer.save.keep.last
        elif trainer.checkpoint_every is not None and trainer.step_count is not None:
            count = 2 + trainer.step_count // trainer.checkpoint_every
        disk += _CHECKPOINT_NBYTES[trainer.export_dtype] * size * count
    above = next(each for each in (subject.runs, *subject.runs.absolute().parents) if each.exists())
    left = shutil.disk_usage(above).free
    if disk > left:
        subject.warning_here(
            "policies",
            f"checkpoints take about {disk / _GIB:.1f} GiB, and {left / _GIB:.1f} are free in "
            f"{above}",
            "keep fewer (trainer.save.keep), or give --runs another folder",
        )


def check_autoscaling(subject: Subject) -> None:
    """Fill the commands that start and stop nodes."""
    values: dict[str, str] = dict.fromkeys(("name", "hub", "recipe", "run"), "x")
    scale = subject.recipe.autoscale
    for key, command in (("start", scale.start), ("stop", scale.stop)):
        if command is None:
            continue
        try:
            program = fill(command, values).split()[0]
        except (AstraflowError, IndexError) as refused:
            message = refused.message if isinstance(refused, AstraflowError) else "it is empty"
            subject.error_here(f"autoscale.{key}", message, "docs/scaling.md has examples")
            continue
        if shutil.which(program) is None:
            subject.warning_here(f"autoscale.{key}", f"there is no command {program} here")


def _gpus(count: int) -> str:
    return f"there {'is' if count == 1 else 'are'} {count or 'none'} here"
