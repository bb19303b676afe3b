"""Losses token by token, from the formulas alone, in double precision."""

import math

import torch


def kl(gap, estimator):
    return {"k1": gap, "k2": gap * gap / 2, "k3": torch.exp(-gap) - 1 + gap}[estimator]


def token_cost(settings, log_ratio, logprob, old, advantage, low, high):
    ratio = torch.exp(log_ratio)
    if settings.surrogate == "clip":
        gain = min(ratio * advantage, torch.clamp(ratio, low, high) * advantage)
        if settings.dual_clip and advantage < 0:
            gain = max(gain, settings.dual_clip * advantage)
        return -gain
    if settings.surrogate == "cispo":
        return -min(max(ratio.item(), low), high) * advantage * logprob
    if settings.surrogate == "sapo":
        sharp = settings.sapo.positive if advantage > 0 else settings.sapo.negative
        return -4 / sharp / (1 + torch.exp(-sharp * (ratio - 1))) * advantage
    if settings.surrogate in ("dppo_tv", "dppo_kl"):
        p, q = (math.exp(each.item()) for each in (logprob, old))
        size = abs(p - q)
        if settings.surrogate == "dppo_kl":
            p, q = (min(max(each, 1e-6), 1 - 1e-6) for each in (p, q))
            size = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        stops = (advantage > 0 and p > q and size > high - 1) or (
            advantage < 0 and p < q and size > 1 - low
        )
        return 0 * logprob if stops else -ratio * advantage
    if settings.surrogate == "sft":
        return -logprob
    return -advantage * logprob


def corrected(correction, gaps, at):
    """Return the weight of token `at` of a row whose log(old / sampler) are `gaps`."""
    spread = {
        "token": gaps[at],
        "sequence": sum(gaps),
        "geometric": sum(gaps) / len(gaps),
    }[correction.level]
    weight = math.exp(spread)
    if correction.style == "truncate":
        return min(weight, correction.high)
    return weight if correction.low <= weight <= correction.high else 0.0


def row_cost(settings, row, low, high):
    """Return the weighted sum over one row; `row` has lists, log-probabilities as scalars."""
    count = len(row["logprobs"])
    gaps = [
        p.item() - q.item() for p, q in zip(row["logprobs"], row["sampler_logprobs"], strict=True)
    ]
    old = (
        [each.detach() for each in row["logprobs"]]
        if settings.old == "recomputed"
        else row["sampler_logprobs"]
    )
    log_ratios = [p - q for p, q in zip(row["logprobs"], old, strict=True)]
    advantages = [settings.advantage_scale * each for each in row["advantages"]]
    if settings.kl and settings.kl.where != "loss":
        for at in range(count):
            rest = sum(
                kl(row["sampler_logprobs"][s] - row["reference"][s], settings.kl.estimator)
                for s in range(at, count if settings.kl.where == "reward" else at + 1)
            )
            advantages[at] = advantages[at] - settings.kl.coefficient * rest
    if settings.ratio == "sequence":
        log_ratios = [sum(log_ratios) / count] * count
        advantages = [sum(advantages) / count] * count
    total = 0
    for at in range(count):
        logprob = row["logprobs"][at]
        cost = token_cost(settings, log_ratios[at], logprob, old[at], advantages[at], low, high)
        if settings.correction:
            cost = cost * corrected(settings.correction, gaps, at)
        if settings.kl and settings.kl.where == "loss":
            gap = row["logprobs"][at] - row["reference"][at]
            cost = cost + settings.kl.coefficient * kl(gap, settings.kl.estimator)
        weight = row["weights"][at] / (count if settings.mean == "rows" else 1)
        total = total + weight * cost
    return total


def batch_loss(settings, rows, *, low, high):
    """Return the loss of a batch, and its gradient by every log-probability, f64."""
    leaves = []
    for row in rows:
        row["logprobs"] = [each.clone().requires_grad_() for each in row["logprobs"]]
        leaves += row["logprobs"]
    divisor = {
        "tokens": len(leaves),
        "rows": len(rows),
        "constant": len(rows) * (settings.row_tokens or 1),
    }[settings.mean]
    loss = sum(row_cost(settings, row, low, high) for row in rows) / divisor
    loss.backward()
    return loss.item(), torch.stack(
        [torch.zeros(()) if each.grad is None else each.grad for each in leaves]
    )
