"""What is checked: a recipe, and what earlier checks have made of it for later ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.config.recipe import Recipe
from astraflow.core.tasks import Prompt
from astraflow.engines.tokenizer import Tokenizer
from astraflow.launch.check.guard import UserLoop
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.data_sets.reader import DataSetReader
from astraflow.workflows.protocol import Scorer, Workflow


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltWorkflow:
    """A workflow that was made from a recipe.

    Attributes:
        workflow: Its scorer runs in this process.
        scorer: The same; None: the workflow scores.
    """

    workflow: Workflow
    scorer: Scorer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Rows with the same fields of the same types.

    Attributes:
        prompt: The first of them.
        row_number: Its number among the rows that are kept, from 1.
        count: Rows of this kind.
    """

    prompt: Prompt
    row_number: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenData:
    """A data set that was read.

    Attributes:
        reader: Of it.
        kinds: Of its rows, the most frequent first.
        longest: Indexes of all rows, the longest text first.
        digests: Of what each row says beside its id.
    """

    reader: DataSetReader
    kinds: Sequence[Kind]
    longest: Sequence[int]
    digests: frozenset[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenModel:
    """What is known of a policy's model without its weights.

    Attributes:
        config: `config.json`, its text part.
        tokenizer: Of it.
        eos_ids: Tokens that end a generation.
        template: Of its chats.
        max_context: Tokens of prompt and completion, as the recipe has them; None: not known.
        parameter_count: 0: not known.
    """

    config: Mapping[str, Any]
    tokenizer: Tokenizer
    eos_ids: Sequence[int]
    template: ChatTemplate
    max_context: int | None
    parameter_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A recipe under check.

    Attributes:
        recipe: Resolved.
        source: Its file.
        runs: Folder that is to keep the run.
        loop: On which code of the user runs.
        workflows: Those that could be made, by name.
        data: Data sets that could be read, by name.
        models: Of the policies whose model is here.
    """

    recipe: Recipe
    source: Path
    runs: Path
    loop: UserLoop
    workflows: dict[str, BuiltWorkflow] = field(default_factory=dict[str, BuiltWorkflow])
    data: dict[str, SeenData] = field(default_factory=dict[str, SeenData])
    models: dict[str, SeenModel] = field(default_factory=dict[str, SeenModel])
