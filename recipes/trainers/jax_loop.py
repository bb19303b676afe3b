"""A Llama in pure JAX as a trainer: its gradient by jax.grad, Adam by hand.

PYTHONPATH=recipes/trainers astraflow run recipes/sort.yaml \
    --set policies.solver.trainer.engine=jax_loop:JaxLlama
"""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from safetensors.numpy import load_file, save_file

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.rows import TrainRows


def norm(x, weight, eps):
    return weight * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)


def turned(x, base):  # rotary positions; f32[n, L, heads, size]
    half = x.shape[3] // 2
    angles = jnp.arange(x.shape[1])[:, None] / base ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def logits(weights, tokens, shape):  # i32[n, L] -> f32[n, L, V]
    layers, head_size, base, eps = shape
    embedding = weights["model.embed_tokens.weight"]
    x, heads = embedding[tokens], (*tokens.shape, -1, head_size)
    for layer in range(layers):
        place = f"model.layers.{layer}."
        w = {name.removeprefix(place): each for name, each in weights.items() if place in name}
        y = norm(x, w["input_layernorm.weight"], eps)
        q, k, v = ((y @ w[f"self_attn.{p}_proj.weight"].T).reshape(heads) for p in "qkv")
        y = jax.nn.dot_product_attention(turned(q, base), turned(k, base), v, is_causal=True)
        x += y.reshape(*tokens.shape, -1) @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"], eps)
        gate, up = (y @ w[f"mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x += (jax.nn.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"], eps) @ weights.get("lm_head.weight", embedding).T


def loss(weights, batch, unravel, shape):  # as GRPO clips it
    tokens, gains, sampled = batch
    logprobs = jax.nn.log_softmax(logits(unravel(weights), tokens[:, :-1], shape))
    drawn = jnp.take_along_axis(logprobs, tokens[:, 1:, None], 2)[..., 0]
    ratio, gains = jnp.exp(drawn - sampled[:, 1:]), gains[:, 1:]
    return -jnp.minimum(ratio * gains, ratio.clip(0.8, 1.28) * gains).sum()


@partial(jax.jit, static_argnames=("unravel", "shape"))
def step(state, count, batch, *, rate, unravel, shape):
    weights, first, second = state
    found, gradient = jax.value_and_grad(loss)(weights, batch, unravel, shape)
    size = jnp.linalg.norm(gradient)
    gradient /= jnp.maximum(size, 1.0)
    first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
    pull = first / (1 - 0.9**count) / (jnp.sqrt(second / (1 - 0.95**count)) + 1e-8)
    return jnp.stack([weights - rate * pull, first, second]), found, size


class JaxLlama:
    def __init__(self, settings, model_dir):
        self.rate, self.model_dir = settings.optimizer.learning_rate, model_dir

    def prepare(self):
        config = json.loads((self.model_dir / "config.json").read_text())
        base, eps = config["rope_parameters"]["rope_theta"], config["rms_norm_eps"]
        shape = config["num_hidden_layers"], config["head_dim"], base, eps
        self.vocabulary_size, self.step_count = config["vocab_size"], 0
        weights, self.unravel = ravel_pytree(load_file(self.model_dir / "model.safetensors"))
        self.state = jnp.stack([weights, 0 * weights, 0 * weights])  # and Adam's two moments
        self.settings = {"rate": self.rate, "unravel": self.unravel, "shape": shape}

    def named_parameters(self):
        return self.unravel(self.state[0]).items()

    def train_step(self, batch):
        rows = TrainRows.from_parts(batch.parts)
        rows.require_vocabulary(self.vocabulary_size)
        found = size = 0.0
        if rows.row_is_trained.any():
            given = padded(rows, batch.header.loss_token_count)
            state, found, size = step(self.state, self.step_count + 1, given, **self.settings)
            if not jnp.isfinite(size):
                raise AstraflowError(Reason.INTERNAL, f"the norm of the gradient is {size}")
            self.state = state
        self.step_count += 1
        return {"train/loss": float(found), "train/grad_norm": float(size)}

    def save(self, directory):
        shutil.copytree(self.model_dir, directory, dirs_exist_ok=True)
        weights = {name: np.asarray(each) for name, each in self.named_parameters()}
        save_file(weights, directory / "model.safetensors")
        with (directory / "optimizer.pt").open("wb") as file:
            np.savez(file, state=self.state, step_count=self.step_count)

    def wait_for_save(self):
        pass

    def restore(self, directory):
        try:
            saved = np.load(directory / "optimizer.pt")
        except OSError as error:
            raise AstraflowError(Reason.INVALID_FIELD, f"no checkpoint: {error}") from error
        self.state, self.step_count = jnp.asarray(saved["state"]), int(saved["step_count"])


def padded(rows, divisor):  # to few shapes, because each is compiled
    shape = -(-rows.row_count // 32) * 32, -(-rows.lengths.max() // 16) * 16
    tokens, (gains, sampled) = np.zeros(shape, np.int32), np.zeros((2, *shape), np.float32)
    tokens[: rows.row_count][np.arange(shape[1]) < rows.lengths[:, None]] = rows.tokens
    places = rows.loss.rows, rows.loss.positions - rows.offsets[rows.loss.rows]
    gains[places] = rows.loss.advantages * rows.loss.weights / divisor
    sampled[places] = rows.loss.sampler_logprobs
    return tokens, gains, sampled
