"""What the processes of the run agree on."""

import json
from pathlib import Path
from typing import Any, Final

from transformers import LlamaConfig

from astraflow.config.recipe import Recipe
from astraflow.core.ids import PolicyId
from astraflow.testing.recipes import small_recipe

POLICY: Final = PolicyId("solver")
TOKEN: Final = "live"

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "256m": {"vocab_size": 26_624, "hidden_size": 1024, "num_hidden_layers": 12},
    "64m": {"vocab_size": 16_384, "hidden_size": 512, "num_hidden_layers": 11},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2},
}


def write_model(folder: Path, shape: str) -> None:
    """Write the configuration of a model; its weights come from the trainer."""
    sizes = SHAPES[shape]
    config: Any = LlamaConfig(
        **sizes,
        num_attention_heads=sizes["hidden_size"] // 64,
        intermediate_size=4 * sizes["hidden_size"],
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(folder)


def recipe_of(folder: Path) -> Recipe:
    """Return the recipe of the run; nobody asks it for data."""
    return small_recipe(folder, changes={"policies.solver.trainer.step_count": 1_000_000})


def say(**what: Any) -> None:
    """Tell the benchmark something."""
    print(json.dumps(what), flush=True)
