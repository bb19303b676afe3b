"""What test_sdk.py has the SDK do, in an interpreter that has it: sdk.py ADDRESS NAME < rows.

It prints JSON.
"""

import json
import sys

import numpy as np
import tinker
from tinker import types

NAME = "Qwen/Qwen3-4B-Instruct-2507"
PROMPT = types.ModelInput.from_ints([1, 2, 3, 4, 5])


def to_data(rows, *names):
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row["tokens"]),
            loss_fn_inputs={
                name: types.TensorData.from_numpy(
                    np.asarray(row[name], np.int64 if name == "target_tokens" else np.float32)
                )
                for name in ("target_tokens", *names)
            },
        )
        for row in rows
    ]


def logprobs_of(result):
    return [each["logprobs"].data for each in result.loss_fn_outputs]


def train(service, rows):
    """Two steps with every loss, and saves before and after."""
    training = service.create_lora_training_client(base_model=NAME, rank=4).result()
    told = {"before": training.save_state("before").result().path, "losses": {}}
    for loss_fn in ("cross_entropy", "importance_sampling", "ppo", "cispo"):
        names = ("weights",) if loss_fn == "cross_entropy" else ("logprobs", "advantages")
        result = training.forward_backward(to_data(rows, *names), loss_fn)
        step = training.optim_step(
            types.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
        )
        found = result.result()
        told["losses"][loss_fn] = {
            "loss": found.metrics["loss:sum"],
            "logprobs": logprobs_of(found),
            "norm": step.result().metrics["grad_norm"],
        }
    told["after"] = training.save_state("after").result().path
    return told


def sample(service, rows):
    """Frozen sessions, scored prompts, and training's own view of what was sampled."""
    training = service.create_lora_training_client(base_model=NAME, rank=4).result()
    data = to_data(rows, "weights")
    told = []
    samplers = []
    for step in range(3):
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
        samplers.append(training.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=10, seed=step, temperature=1.0, stop=[])
        answer = samplers[-1].sample(prompt=PROMPT, num_samples=2, sampling_params=params).result()
        for sequence in answer.sequences:
            tokens = [*PROMPT.to_ints(), *sequence.tokens]
            row = {"tokens": tokens[:-1], "target_tokens": tokens[1:], "weights": [1.0] * 14}
            seen = training.forward(to_data([row], "weights"), "cross_entropy").result()
            scored = samplers[-1].compute_logprobs(types.ModelInput.from_ints(tokens)).result()
            told.append(
                {
                    "sampled": sequence.logprobs,
                    "trained": logprobs_of(seen)[0][4:],
                    "scored": scored[5:],
                    "ids": len({each.sequence_id for each in answer.sequences}),
                }
            )
    params = types.SamplingParams(max_tokens=10, seed=0, temperature=1.0, stop=[])
    again = samplers[0].sample(prompt=PROMPT, num_samples=1, sampling_params=params).result()
    base = service.create_sampling_client(base_model=NAME)
    other = base.sample(prompt=PROMPT, num_samples=1, sampling_params=params).result()
    return {
        "steps": told,
        "again": again.sequences[0].logprobs,
        "base": other.sequences[0].logprobs,
    }


def chunks(service, rows):
    """A batch that the SDK cuts into three, sent in another order than they are to run in."""
    training = service.create_lora_training_client(base_model=NAME, rank=4).result()
    data = to_data(rows, "weights")
    many = [data[index % len(data)] for index in range(2100)]
    result = training.forward_backward(many, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    found = result.result()
    return {
        "logprobs": logprobs_of(found)[: len(data)],
        "last": logprobs_of(found)[-1],
        "count": len(found.loss_fn_outputs),
        "loss": found.metrics["loss:sum"],
        "norm": step.result().metrics["grad_norm"],
    }


def custom(service, rows):
    """A loss of the program's own, of which the server computes the gradient."""
    trainings = [service.create_lora_training_client(base_model=NAME, rank=4) for _ in range(2)]
    first, second = [each.result() for each in trainings]

    def loss(data, logprobs):
        total = sum((each * each).sum() for each in logprobs)
        return total, {"squares:sum": float(total.detach())}

    made = first.forward_backward_custom(to_data(rows, "weights"), loss).result()
    step = first.optim_step(types.AdamParams()).result()
    seen = second.forward(to_data(rows, "weights"), "cross_entropy").result()
    weighted = [
        {**row, "weights": [-2 * value for value in found]}
        for row, found in zip(rows, logprobs_of(seen), strict=True)
    ]
    second.forward_backward(to_data(weighted, "weights"), "cross_entropy").result()
    return {
        "metrics": made.metrics,
        "squares": sum(value * value for found in logprobs_of(seen) for value in found),
        "norms": [
            step.metrics["grad_norm"],
            second.optim_step(types.AdamParams()).result().metrics["grad_norm"],
        ],
    }


def save(service, rows):
    """What a process that is killed leaves to the next."""
    training = service.create_lora_training_client(base_model=NAME, rank=4).result()
    data = to_data(rows, "weights")
    training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    told = {
        "state": training.save_state("half").result().path,
        "sampler": training.save_weights_for_sampler("half").result().path,
    }
    training.forward_backward(data, "cross_entropy")
    norm = training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    seen = training.forward(data, "cross_entropy").result()
    return {**told, "norm": norm.metrics["grad_norm"], "logprobs": logprobs_of(seen)}


def resume(service, told):
    """Go on where `save` saved."""
    training = service.create_training_client_from_state_with_optimizer(told["state"]).result()
    data = to_data(told["rows"], "weights")
    training.forward_backward(data, "cross_entropy")
    norm = training.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    seen = training.forward(data, "cross_entropy").result()
    sampler = service.create_sampling_client(model_path=told["sampler"])
    sampled = sampler.sample(
        prompt=PROMPT,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=3, seed=1),
    ).result()
    return {
        "norm": norm.metrics["grad_norm"],
        "logprobs": logprobs_of(seen),
        "sampled": len(sampled.sequences[0].tokens),
    }


def fail(service, rows):
    """Errors come as errors, with what is wrong."""
    training = service.create_lora_training_client(base_model=NAME, rank=4).result()
    data = to_data(rows, "weights")
    wrong = types.Datum(
        model_input=types.ModelInput(
            chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=3)]
        ),
        loss_fn_inputs=data[0].loss_fn_inputs,
    )
    told = {}
    for name, call in {
        "image": lambda: training.forward_backward([wrong], "cross_entropy").result(),
        "loss": lambda: training.forward_backward(data, "dro").result(),
        "inputs": lambda: training.forward_backward(data, "ppo").result(),
        "path": lambda: training.save_state("../up").result(),
        "missing": lambda: service.create_training_client_from_state(
            training.save_state("x").result().path + "y"
        ).result(),
        "rank": lambda: service.create_lora_training_client(base_model=NAME, rank=100).result(),
        "model": lambda: service.create_lora_training_client(base_model="a/b", rank=1).result(),
    }.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            told[name] = str(error)
    told["after"] = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    return told


def main():
    """Do what is named."""
    address, name = sys.argv[1:]
    service = tinker.ServiceClient(base_url=f"http://{address}", api_key="tml-test")
    told = globals()[name](service, json.load(sys.stdin))
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
