"""The same in a few lines of plain torch: LoRA, losses, AdamW."""

import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

PREFIX = "base_model.model."


class Plain:
    """A model with the adapters of a checkpoint, or all of its own weights."""

    def __init__(self, model_dir, checkpoint=None, *, scale=1.0):
        self.module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.scale = scale
        self.adapters = {}
        if checkpoint is not None:
            found = load_file(checkpoint / "adapter_model.safetensors")
            self.adapters = {name: each.clone() for name, each in found.items()}
        self.trained = list(self.adapters.values()) or list(self.module.parameters())
        for each in self.trained:
            each.requires_grad_()

    def weights(self):
        """Return the merged weights of adapted layers: W + s B A."""
        merged = {}
        for name, first in self.adapters.items():
            path, side, _ = name.removeprefix(PREFIX).rsplit(".", 2)
            if side == "lora_A":
                second = self.adapters[name.replace("lora_A", "lora_B")]
                weight = self.module.get_parameter(f"{path}.weight").detach()
                merged[f"{path}.weight"] = weight + self.scale * second @ first
        return merged

    def logprobs(self, row):
        """Return the log-probabilities of a row's targets, in their shape."""
        tokens = torch.as_tensor(row["tokens"])[None]
        logits = functional_call(self.module, self.weights(), (tokens,)).logits[0]
        targets = torch.as_tensor(row["target_tokens"])
        wide = targets.reshape(len(targets), -1)
        return logits.log_softmax(-1).gather(1, wide).reshape(targets.shape)

    def loss(self, row, loss_fn, low=None, high=None):
        """Return the sum of a loss over a row."""
        found = self.logprobs(row)
        if loss_fn == "cross_entropy":
            return -(torch.as_tensor(row["weights"]) * found).sum()
        advantages = torch.as_tensor(row["advantages"])
        ratio = (found - torch.as_tensor(row["logprobs"])).exp()
        if loss_fn == "importance_sampling":
            return -(ratio * advantages).sum()
        clipped = ratio.clamp(low, high)
        if loss_fn == "ppo":
            return -torch.minimum(ratio * advantages, clipped * advantages).sum()
        return -(clipped.detach() * advantages * found).sum()

    def adam(self, **settings):
        return torch.optim.AdamW(self.trained, **settings)
