"""Reads rollouts; see rollout.py."""

_Trajectory = tuple[
    str,  # trajectory_id
    str,  # policy_id
    str | None,  # agent
    int | tuple[str, bytes, int, int],  # tokens, or the payload: name, digest, nbytes, token_count
    int | None,  # offset of them; None where there is a payload, as the others
    int | None,  # offset of sampled_mask
    int | None,  # offset of logprobs
    list[tuple[int, int, int, str | None]],  # version, length, kv, policy_id
    bytes | None,  # sampling
    int | None,  # finish_reason
    str | None,  # parent_trajectory_id
    int | None,  # branch_offset
    int | None,  # segment_index
    float | None,  # reward
    str | None,  # engine
]

def scan(
    data: bytes, /
) -> (
    tuple[
        str,  # rollout_id
        str,  # task_id
        str,  # group_id
        int | None,  # sample_index
        int | None,  # outcome
        float | None,  # reward
        dict[str, float] | None,  # reward_parts
        bytes | None,  # reward_code_digest
        list[_Trajectory],
        dict[str, float] | None,  # metrics
        tuple[int, int] | None,  # start_time
        tuple[int, int] | None,  # finish_time
        str | None,  # traceparent
    ]
    | None
): ...

# Whether it is a Rollout, its start and its end.
def split(data: bytes, /) -> list[tuple[bool, int, int]] | None: ...

# Whether a StreamRolloutsRequest has no more than so many bytes beside the elements of arrays.
def fits(data: bytes, most: int, /) -> bool: ...
