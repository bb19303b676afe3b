"""What coding two versions costs here, made up or from files."""

import json

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate
from astraflow.launch.bench.codec import codings, from_files, made_up, measure, show_codec
from astraflow.storage.weight_files import write_weights

COUNT = 1 << 20


@pytest.fixture(scope="module")
def versions():
    return made_up(COUNT, 0.01)


def test_made_up_weights_change_in_the_wanted_share(versions):
    old, new = versions.old.view(np.uint16), versions.new.view(np.uint16)
    assert np.mean(old != new) == pytest.approx(0.01, rel=0.05)


def test_every_way_is_measured_and_the_bytes_are_those_of_the_formats(versions):
    rates = {
        coding.name: measure(coding, copy_nbytes=2 * COUNT, repeats=1)
        for coding in codings(versions)
    }
    assert [*rates] == ["fast", "compact", "whole, fast", "whole, compact"]
    assert rates["compact"].nbytes < rates["fast"].nbytes < 0.015 * 2 * COUNT
    assert rates["whole, compact"].nbytes < 0.7 * rates["whole, fast"].nbytes
    assert all(rate.encode_gb_per_s > 0 and rate.decode_gb_per_s > 0 for rate in rates.values())


def write(folder, name, values):
    spec = TensorSpec(name=name, dtype=Dtype.F32, shape=values.shape, offset=0)
    write_weights(folder, (TensorUpdate(spec=spec, indices=None, values=values.view(np.uint32)),))


def test_two_checkpoints_tell_what_a_step_costs(tmp_path, capsys):
    old = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    new = old.copy()
    new[::100] += 1e-3
    write(tmp_path / "a.safetensors", "w", old)
    write(tmp_path / "b.safetensors", "w", new)
    versions = from_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    show_codec(versions, repeats=1, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["model_nbytes"], told["changed"]) == (80_000, 200)
    show_codec(versions, repeats=1, as_json=False)
    assert "200 elements changed" in capsys.readouterr().out


def test_checkpoints_of_two_models_are_refused(tmp_path):
    write(tmp_path / "a.safetensors", "w", np.zeros(4, np.float32))
    write(tmp_path / "b.safetensors", "v", np.zeros(4, np.float32))
    with pytest.raises(AstraflowError) as caught:
        from_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
