"""What is computed, against plain torch."""

import asyncio
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from astraflow.tinker.checkpoints import CheckpointPath
from astraflow_proto.tinker.v1 import tinker_pb2 as pb

from .conftest import VOCABULARY, RefusedError, datum, made_data, to_data
from .plain import Plain

INPUTS = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
}
BOUNDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
ADAM = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture
def plain(settings, model_dir):
    def read(path):
        folder = settings.directory / CheckpointPath.parse(path).relative
        fields = json.loads((folder / "adapter_config.json").read_text())
        return Plain(model_dir, folder, scale=fields["lora_alpha"] / fields["r"])

    return read


@pytest.fixture
def saved(settings):
    return lambda path: load_file(
        settings.directory / CheckpointPath.parse(path).relative / "adapter_model.safetensors"
    )


async def scattered(model):
    """Take a step, so that no adapter is 0."""
    await model.forward_backward(to_data(made_data(4, seed=9), "weights"))
    await model.optim_step(learning_rate=0.05)


@pytest.mark.parametrize("loss_fn", INPUTS)
async def test_a_loss_and_its_gradient_are_those_of_its_formula(model, plain, saved, loss_fn):
    await scattered(model)
    path = await model.save("before")
    before = plain(path)
    rows = [*made_data(6, seed=1), *made_data(2, seed=2, width=3)]
    found, metrics = await model.forward_backward(to_data(rows, *INPUTS[loss_fn]), loss_fn)
    loss = sum(before.loss(row, loss_fn, *BOUNDS.get(loss_fn, ())) for row in rows)
    assert metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for row, one in zip(rows, found, strict=True):
        np.testing.assert_allclose(one, before.logprobs(row).detach(), atol=1e-5)
    loss.backward()
    # So steps are g / (|g| + 1): they tell how large a gradient is, too.
    norm = torch.nn.utils.get_total_norm([each.grad for each in before.trained])
    before.adam(lr=1.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0).step()
    fresh = await model.peer.restored(path, optimizer=False)
    await fresh.forward_backward(to_data(rows, *INPUTS[loss_fn]), loss_fn)
    await fresh.optim_step(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0)
    after = saved(await fresh.save("after"))
    for name, each in before.adapters.items():
        torch.testing.assert_close(after[name], each.detach(), atol=1e-5 * max(1, norm), rtol=0)


async def test_steps_are_those_of_adamw(model, plain, saved):
    before = plain(await model.save("before"))
    optimizer = before.adam(lr=0.0)
    for step in range(4):
        rows = made_data(5, seed=step)
        rate = 1e-2 * (step + 1)
        await model.forward_backward(to_data(rows, "weights"))
        told = await model.optim_step(**{**ADAM, "learning_rate": rate}, grad_clip_norm=0.5)
        sum(before.loss(row, "cross_entropy") for row in rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(before.trained, 0.5)
        assert told["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for group in optimizer.param_groups:
            group |= {"lr": rate, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
        optimizer.step()
        optimizer.zero_grad()
    after = saved(await model.save("after"))
    for name, each in before.adapters.items():
        torch.testing.assert_close(after[name], each.detach(), atol=1e-5, rtol=1e-4)


async def test_gradients_add_up_until_a_step_uses_them(peer, saved):
    rows = made_data(6)
    first, second = [await peer.create_model(rank=4) for _ in range(2)]
    await first.forward_backward(to_data(rows, "weights"))
    for row in rows:
        await second.forward_backward(to_data([row], "weights"))
    for each in (first, second):
        await each.optim_step(**ADAM)
    weights = [saved(await each.save("one")) for each in (first, second)]
    for name, one in weights[0].items():
        torch.testing.assert_close(one, weights[1][name], atol=1e-5, rtol=1e-4)


async def test_what_fails_and_what_only_looks_add_no_gradient(peer, saved):
    first, second = [await peer.create_model(rank=4) for _ in range(2)]
    good = to_data(made_data(3), "weights")
    for each in (first, second):
        await each.forward_backward(good)
    await second.forward_backward(to_data(made_data(3, seed=5), "weights"), forward_only=True)
    with pytest.raises(RefusedError, match="token 999"):
        await second.forward_backward([*good, datum([999], target_tokens=[1], weights=[1.0])])
    for each in (first, second):
        await each.optim_step(**ADAM)
    weights = [saved(await each.save("one")) for each in (first, second)]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


async def test_a_sparse_matrix_is_the_dense_one_with_zeros(model):
    row = made_data(1, width=3, most=9)[0]
    targets, weights = row["target_tokens"], row["weights"].copy()
    listed = np.random.default_rng(0).random(targets.shape) < 0.5
    targets[~listed], weights[~listed] = 0, 0
    dense = datum(row["tokens"], target_tokens=targets, weights=weights)
    sparse = pb.Datum()
    sparse.CopyFrom(dense)
    for name, array in (("target_tokens", targets), ("weights", weights)):
        rows, columns = np.nonzero(listed)
        offsets = np.searchsorted(rows, np.arange(len(targets) + 1))
        one = sparse.loss_fn_inputs[name]
        kind = "<i8" if name == "target_tokens" else "<f4"
        one.sparse_rows.values = array[listed].astype(kind).tobytes()
        one.sparse_rows.row_offsets = offsets.astype("<i8").tobytes()
        one.sparse_rows.columns = columns.astype("<i8").tobytes()
    found = [await model.forward_backward([each], forward_only=True) for each in (dense, sparse)]
    assert found[0][1] == found[1][1]
    np.testing.assert_array_equal(found[0][0][0], found[1][0][0])


async def test_bounds_of_a_clip_are_the_callers(model, plain):
    rows = made_data(4)
    before = plain(await model.save("before"))
    data = to_data(rows, "logprobs", "advantages")
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 0.9}
    _, metrics = await model.forward_backward(data, "ppo", **bounds)
    loss = sum(before.loss(row, "ppo", 0.5, 0.9) for row in rows)
    assert metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    with pytest.raises(RefusedError, match="clip_high_threshold"):
        await model.forward_backward(data, "ppo", clip_hi=0.9)


async def test_rank_0_trains_all_weights_and_leaves_those_of_others(peer, model_dir, settings):
    whole, other = await peer.create_model(rank=0), await peer.create_model(rank=2)
    rows = made_data(3)
    plain = Plain(model_dir)
    optimizer = plain.adam(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(2):
        await whole.forward_backward(to_data(rows, "weights"))
        await whole.optim_step(learning_rate=1e-2, eps=1e-8)
        sum(plain.loss(row, "cross_entropy") for row in rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, _ = await whole.forward_backward(to_data(rows, "weights"), forward_only=True)
    for row, one in zip(rows, found, strict=True):
        np.testing.assert_allclose(one, plain.logprobs(row).detach(), atol=1e-4)
    untouched = Plain(model_dir)
    found, _ = await other.forward_backward(to_data(rows, "weights"), forward_only=True)
    for row, one in zip(rows, found, strict=True):
        np.testing.assert_allclose(one, untouched.logprobs(row).detach(), atol=1e-5)
    path = await whole.save("whole")
    again = await peer.restored(path)
    for each in (whole, again):
        await each.forward_backward(to_data(rows, "weights"))
        await each.optim_step(learning_rate=1e-2)
    found = [
        (await each.forward_backward(to_data(rows, "weights"), forward_only=True))[1]
        for each in (whole, again)
    ]
    assert found[0] == found[1]


async def test_a_checkpoint_goes_on_to_the_bit_with_its_optimizer(peer, model, saved):
    await scattered(model)
    path = await model.save("half")
    again = await peer.restored(path)
    for each in (model, again):
        await each.forward_backward(to_data(made_data(3), "weights"))
        await each.optim_step(**ADAM)
    weights = [saved(await each.save("end")) for each in (model, again)]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())
    # In place, too; and without the optimizer another step follows.
    told = await peer.done("load_weights", **model.next(), path=path, optimizer=False)
    assert told["model_id"] == model.model_id
    await model.forward_backward(to_data(made_data(3), "weights"))
    await model.optim_step(**ADAM)
    other = saved(await model.save("other"))
    assert not all(torch.equal(one, weights[0][name]) for name, one in other.items())


async def test_requests_run_by_their_numbers_whatever_order_they_come_in(peer, saved):
    first, second = [await peer.create_model(rank=4) for _ in range(2)]
    parts = [to_data(made_data(2, seed=seed), "weights") for seed in range(3)]
    for part in parts:
        await first.forward_backward(part)
    await first.optim_step(**ADAM)
    await first.forward_backward(parts[0])
    messages = [second.message(part) for part in parts]
    step = {**second.next(), "adam_params": ADAM}
    last = await second.send(second.message(parts[0]))
    told = [await peer.post("optim_step", **step)]
    told += [await second.send(messages[index]) for index in (1, 2, 0)]
    await asyncio.gather(*(peer.result(each) for each in (*told, last)))
    weights = [saved(await each.save("one")) for each in (first, second)]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


async def test_a_request_that_is_sent_again_is_done_once(peer, model):
    message = model.message(to_data(made_data(2), "weights"))
    first, again = await model.send(message), await model.send(message)
    assert first == again
    step = {**model.next(), "adam_params": ADAM}
    told = [await peer.post("optim_step", **step) for _ in range(2)]
    assert told[0] == told[1]
    answers = [await peer.result(told[0]) for _ in range(2)]
    assert answers[0] == answers[1]
    message.data[0].loss_fn_inputs["weights"].CopyFrom(
        pb.Tensor(dense=b"", element_type=pb.ELEMENT_TYPE_F32)
    )
    answer = await peer.http.post("forward_backward", content=message.SerializeToString())
    assert answer.status_code == 409


async def test_a_wrong_request_has_its_turn(peer, model):
    """Those after it go on, in their order."""
    wrong = await peer.post("optim_step", **model.next(), adam_params={"learning_rate": -1.0})
    right = await peer.post("optim_step", **model.next(), adam_params=ADAM)
    with pytest.raises(RefusedError, match="learning_rate") as refused:
        await peer.result(wrong)
    assert refused.value.category == "user"
    assert await peer.result(right) == {"metrics": {"grad_norm": 0.0}}


async def test_a_gradient_that_is_not_finite_changes_nothing(model, saved):
    before = saved(await model.save("before"))
    data = made_data(1, most=4)
    data[0]["logprobs"][:] = -200.0
    data[0]["advantages"][:] = 1.0
    await model.forward_backward(to_data(data, "logprobs", "advantages"), "importance_sampling")
    with pytest.raises(RefusedError, match="not finite"):
        await model.optim_step(**ADAM)
    after = saved(await model.save("after"))
    assert all(torch.equal(one, after[name]) for name, one in before.items())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "at least one datum"),
        ([pb.Datum()], "no tokens"),
        ([pb.Datum(model_input=[pb.Chunk(image=b"png")])], "image is not served"),
        ([pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedText(tokens=b"abc"))])], "3 bytes"),
        ([datum([1, 2], target_tokens=[1, 2])], "weights"),
        ([datum([1, 2], target_tokens=[1], weights=[1.0])], "2 tokens"),
        ([datum([1, 2], target_tokens=[1, 2], weights=[1.0, np.nan])], "finite"),
        ([datum([1, 2], target_tokens=[1, VOCABULARY], weights=[1.0, 1.0])], "259"),
        ([datum([1, 2], target_tokens=[1.0, 2.0], weights=[1.0, 1.0])], "integers"),
        ([datum([1] * 2049, target_tokens=[1] * 2049, weights=[1.0] * 2049)], "2049 tokens"),
    ],
)
async def test_a_datum_that_cannot_be_computed_is_refused_by_name(model, data, why):
    with pytest.raises(RefusedError, match=why) as refused:
        await model.forward_backward(data)
    assert refused.value.category == "user"


@pytest.mark.parametrize("loss_fn", ["dro", "gspo", "custom", "stable_reinforce", ""])
async def test_losses_that_are_not_served_are_refused_by_name(model, loss_fn):
    with pytest.raises(RefusedError, match="is not served") as refused:
        await model.forward_backward(to_data(made_data(1), "weights"), loss_fn)
    assert refused.value.category == "user"
