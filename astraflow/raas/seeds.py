"""Seeds: chance of one sample, the same for every attempt on every node."""

from dataclasses import replace
from hashlib import blake2b

from astraflow.core.ids import PolicyId
from astraflow.core.tasks import RolloutTask, SamplingParams


def sample_seed(task: RolloutTask, sample_index: int, *, run_seed: int | None) -> int:
    """Return the seed of one sample.

    It depends on the run's seed, the prompt, the pass over the data set, the sample and the
    purpose; not on the attempt, the node or the policy.

    Returns:
        0 .. 2**63 - 1.
    """
    prompt = task.prompt
    parts = (run_seed or 0, prompt.prompt_id, prompt.epoch, sample_index, task.purpose)
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded_sampling(task: RolloutTask, sample_index: int, policy_id: PolicyId) -> SamplingParams:
    """Return the sampling defaults of one sample: the task's, with the sample's own seed."""
    sampling = task.sampling.get(policy_id, SamplingParams())
    return replace(sampling, seed=sample_seed(task, sample_index, run_seed=sampling.seed))
