"""The models of the demos: a Llama of 0.24 million parameters, and the same with experts."""

from typing import Any

from astraflow.workflows.tokenizer_files import BOS_ID, EOS_ID, PAD_ID, vocabulary

_EXPERTS_PER_TOKEN = 2


def tiny_llama_config(alphabet: str, *, max_position_embeddings: int = 64) -> dict[str, Any]:
    """Return a Hugging Face `config.json`.

    The head size is 32 because CPU attention kernels of inference servers know 32, 64, 80,
    96 and up, and fail at their first request with others.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary(alphabet)),
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def tiny_moe_config(alphabet: str, expert_count: int) -> dict[str, Any]:
    """Return the config of the same model with experts in place of its wide layers.

    A token goes through two experts, which together are as wide as the dense model.
    """
    dense = tiny_llama_config(alphabet)
    return {
        **dense,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": expert_count,
        "num_experts_per_tok": _EXPERTS_PER_TOKEN,
        "moe_intermediate_size": dense["intermediate_size"] // _EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
    }
