"""What a model directory is known by: members of a run compare it before they work together."""

from pathlib import Path

from blake3 import blake3

from astraflow.core.members import ModelIdentity
from astraflow.workflows.agents.template import PLAIN, load_template


def read_identity(model_dir: Path) -> ModelIdentity:
    """Return the name of a Hugging Face directory and the digests of its text encoding.

    The digest of config.json stays empty: each release of a library writes that file in another
    way for the same model, and layouts of weights are compared anyhow.

    Args:
        model_dir: With tokenizer.json and a chat template, where the model has them.

    Raises:
        AstraflowError: INVALID_FIELD when the chat template cannot be read.
    """
    tokenizer = model_dir / "tokenizer.json"
    template = load_template(model_dir).source
    return ModelIdentity(
        name=model_dir.name,
        tokenizer_digest=blake3(tokenizer.read_bytes()).digest() if tokenizer.is_file() else b"",
        chat_template_digest=b"" if template == PLAIN else blake3(template.encode()).digest(),
    )
