"""The Helm chart, as helm renders it."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.launch.executors.kubernetes import KubernetesOptions

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.skipif(not shutil.which("helm"), reason="helm is missing: https://helm.sh"),
]

ALL = ("nodes.enabled=true", "secret=hf", "launcher.set={seed=3}")


def helm(tmp_path, *words):
    homes = {f"HELM_{kind}_HOME": str(tmp_path) for kind in ("CACHE", "CONFIG", "DATA")}
    command = ("helm", *words)
    environment = {**os.environ, **homes}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def rendered(tmp_path, *values):
    sets = [part for value in ("claim=shared", *values) for part in ("--set", value)]
    done = helm(tmp_path, "template", "lab", str(ROOT / "scripts" / "chart"), *sets)
    assert done.returncode == 0, done.stderr
    return {
        (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)
    }


def test_the_launcher_of_the_chart_runs_a_recipe_on_kubernetes(tmp_path):
    job = rendered(tmp_path, *ALL)["Job", "lab-launcher"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["args"]
    assert words[:2] == ["run", "recipes/sort.yaml"]
    assert "--on=kubernetes" in words
    overrides = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
    options = [f"executor.options.{w[9:]}" for w in words if w.startswith("--on-set=")]
    recipe = load_recipe(
        ROOT / "recipes" / "sort.yaml", ("executor.name=kubernetes", *options, *overrides)
    )
    assert (recipe.hub.advertise, recipe.raas.count, recipe.seed) == ("lab-hub.default", 0, 3)
    KubernetesOptions.model_validate(recipe.executor.options)
    assert recipe.executor.options["pod"] == {
        "securityContext": {"runAsUser": 1000, "fsGroup": 1000}
    }
    assert pod["serviceAccountName"] == "lab-launcher"


@pytest.mark.parametrize(
    ("is_begun", "words"),
    [(False, "run recipes/sort.yaml"), (True, "run --resume")],
)
def test_a_launcher_that_comes_again_goes_on_with_its_run(tmp_path, is_begun, words):
    job = rendered(tmp_path)["Job", "lab-launcher"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    if is_begun:
        run_dir = RunDir(tmp_path)
        run_dir.journal.parent.mkdir()
        run_dir.journal.touch()
    (tmp_path / "astraflow").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "astraflow").chmod(0o700)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path)}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(words), shlex.join(command)


@pytest.mark.parametrize("scaler", ["none", "keda", "hpa"])
def test_nodes_have_either_a_number_or_a_scaler(tmp_path, scaler):
    found = rendered(tmp_path, *ALL, f"nodes.scaler={scaler}")
    assert ("replicas" in found["Deployment", "lab-nodes"]["spec"]) == (scaler == "none")
    kinds = {kind for kind, _ in found}
    assert ("ScaledObject" in kinds, "HorizontalPodAutoscaler" in kinds) == (
        scaler == "keda",
        scaler == "hpa",
    )


def test_the_chart_has_no_faults_and_wants_a_claim(tmp_path):
    chart = str(ROOT / "scripts" / "chart")
    done = helm(tmp_path, "lint", "--strict", chart, "--set", "claim=shared")
    assert done.returncode == 0, done.stdout + done.stderr
    refused = helm(tmp_path, "template", "lab", chart)
    assert refused.returncode
    assert "name a PersistentVolumeClaim" in refused.stderr


@pytest.mark.parametrize("release", ["1.29.0", "1.37.0"])
@pytest.mark.parametrize("tls", ["true", "false"])
def test_what_the_chart_makes_is_valid(tmp_path, release, tls):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    found = rendered(tmp_path, *ALL, "nodes.scaler=hpa", f"tls={tls}")
    assert len(found) == 7
    for manifest in found.values():
        validator.validate(manifest, release, strict=True)
