"""Trains by minibatches with the loss functions of verl or AReaL themselves.

Run by an interpreter that has one of them, and torch and transformers; astraflow need not be there:

    PYTHON published.py {verl,areal} FOLDER

FOLDER has `model`, `cases.json` and `rows.npz`; `NAME.npz` is written for each case.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM


def verl_loss(case, rows, logprobs):
    """Return the loss of a minibatch; what is of a row is padded to the longest."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: PLC0415 - one is here
    from verl.workers.config import ActorConfig  # noqa: PLC0415

    mask = pad_sequence([torch.ones_like(each) for each in logprobs], batch_first=True)
    said = pad_sequence(logprobs, batch_first=True)
    old, sampler, advantages, reference = (
        pad_sequence([row[name] for row in rows], batch_first=True)
        for name in ("old", "sampler", "advantages", "reference")
    )
    weights = None
    if case.get("correction"):
        found, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old, sampler, mask, **case["correction"]
        )
        weights = found and found.batch["rollout_is_weights"]
    actor = {"strategy": "fsdp", "rollout_n": 4, "use_dynamic_bsz": True, **case.get("actor", {})}
    config, mode = ActorConfig(**actor), case.get("mode", "token-mean")
    config.global_batch_info.update(case.get("batch", {}))
    loss, _ = core_algos.get_policy_loss_fn(case["loss"])(
        old_log_prob=sampler if case.get("is_sampler_old") else old,
        log_prob=said,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    if case.get("kl"):
        estimates = core_algos.kl_penalty(said, reference, case["kl"]["type"])
        loss = loss + case["kl"]["coefficient"] * core_algos.agg_loss(estimates, mask, mode)
    return loss


def areal_loss(case, rows, logprobs):
    """Return the loss of a minibatch; rows lie one after another."""
    from areal.api.cli_args import RejectionSamplingConfig  # noqa: PLC0415 - one is here
    from areal.utils import functional  # noqa: PLC0415

    said = torch.cat(logprobs)
    old, sampler, advantages = (
        torch.cat([row[name] for row in rows]) for name in ("old", "sampler", "advantages")
    )
    lengths = torch.tensor([0, *map(len, logprobs)])
    common = {
        "logprobs": said,
        "old_logprobs": sampler,
        "advantages": advantages,
        "loss_mask": torch.ones_like(said, dtype=torch.bool),
        "cu_seqlens": lengths.cumsum(0).int(),
        **case["options"],
    }
    if case["loss"] == "sapo":
        return functional.sapo_loss_fn(**common)[0]
    sampling = case.get("rejection") and RejectionSamplingConfig(**case["rejection"])
    return functional.ppo_actor_loss_fn(
        **common,
        proximal_logprobs=sampler if case.get("is_sampler_old") else old,
        rejection_sampling=sampling,
    )[0]


def logprobs_of(model, row):
    tokens, at = row["tokens"], row["positions"]
    return model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)[at - 1, tokens[at]]


def trained(folder, case, loss_of, rows, parts):
    """Return the loss and the gradient of each update, and the weights after the last."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rate, eps = case["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), eps=eps, weight_decay=0.0
    )
    with torch.no_grad():
        for row in rows:
            row["old"] = logprobs_of(model, row)
    losses, gradients = [], []
    for part in parts:
        chosen = [rows[index] for index in np.flatnonzero(part)]
        loss = loss_of(case, chosen, [logprobs_of(model, row) for row in chosen])
        loss.backward()
        losses.append(loss.item())
        gradients.append(flat(each.grad for each in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": np.array(losses),
        "gradients": np.stack(gradients),
        "weights": flat(each.detach() for each in model.parameters()),
    }


def flat(tensors):
    return torch.cat([each.reshape(-1) for each in tensors]).numpy()


def rows_of(found):
    """Return one mapping of tensors per row."""
    rows = []
    for index, (start, end) in enumerate(
        zip(found["offsets"][:-1], found["offsets"][1:], strict=True)
    ):
        at = found["rows"] == index
        rows.append(
            {
                "tokens": torch.from_numpy(found["tokens"][start:end]).long(),
                "positions": torch.from_numpy(found["positions"][at] - start),
                **{
                    name: torch.from_numpy(found[name][at])
                    for name in ("sampler", "advantages", "reference")
                },
            }
        )
    return rows


def main():
    """Train by every case, each from the first weights."""
    torch.set_num_threads(1)
    framework, folder = sys.argv[1], Path(sys.argv[2])
    loss_of = {"verl": verl_loss, "areal": areal_loss}[framework]
    found = dict(np.load(folder / "rows.npz"))
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        made = trained(folder, case, loss_of, rows_of(found), found["parts"])
        np.savez(folder / f"{name}.npz", **made)


if __name__ == "__main__":
    main()
