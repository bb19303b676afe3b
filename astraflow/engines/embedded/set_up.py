"""How the engine decodes, by the recipe and the model."""

import torch

from astraflow.config.recipe import EngineSettings
from astraflow.engines.embedded.decoder import DecoderSettings
from astraflow.engines.embedded.limits import device_of, max_context_of
from astraflow.engines.embedded.model import Architecture
from astraflow.engines.embedded.sampler import Sampler
from astraflow.engines.embedded.step import Stepper
from astraflow.engines.embedded.stops import Stops
from astraflow.engines.tokenizer import SpecialIds, Tokenizer

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def decoder_settings(
    settings: EngineSettings,
    architecture: Architecture,
    *,
    special: SpecialIds,
    tokenizer: Tokenizer | None,
) -> DecoderSettings:
    """Return how a decoder works.

    Args:
        settings: Of the recipe.
        architecture: Of the model.
        special: Its special tokens.
        tokenizer: None: no text is read, so no stop strings.

    Raises:
        AstraflowError: INVALID_FIELD when the settings do not fit.
    """
    device = device_of(settings.device)
    return DecoderSettings(
        architecture=architecture,
        max_batch=settings.max_batch,
        max_context=max_context_of(settings.max_context, architecture),
        dtype=_DTYPES[settings.dtype],
        device=device,
        sampler=Sampler(
            vocab_size=architecture.vocab_size,
            eos_ids=special.eos,
            never_sampled_ids=special.never_sampled,
            device=device,
        ),
        stops=Stops(vocab_size=architecture.vocab_size, eos_ids=special.eos, tokenizer=tokenizer),
        stepper=Stepper(is_recordable=architecture.is_static),
    )
