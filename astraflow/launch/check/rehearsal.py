"""Rehearsals: workflows and scorers run on real rows, with answers that are given to them.

A workflow samples from a policy that answers what the rehearsal has it say: the right answer where
it is known, nothing at all, and a wrong one. Prompts are those that the run is going to make, so
their lengths are exact. What raises here raises in a run, too.
"""

import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, cast

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import GroupId, PolicyId, TaskId, WorkflowId
from astraflow.core.rollouts import FinishReason, VersionSpan
from astraflow.core.tasks import Prompt, RolloutTask, SamplingParams, TaskPurpose
from astraflow.engines.protocol import Engine, Generation
from astraflow.engines.tokenizer import FastTokenizer
from astraflow.launch.check.guard import (
    OvertimeError,
    is_process_refused,
    message_of,
    user_lines,
)
from astraflow.launch.check.subject import RowKind, SeenData, SeenModel, Subject
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.protocol import PolicyFault, Scorer, Workflow
from astraflow.workflows.scoring import checked_score, score_of_fault

_ROWS = 8
_WRONG = ("", "I do not know.")
# Forms in which a scorer may want an answer that a row has in short.
_FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "Answer: {}", "<answer>{}</answer>")
_UNBOUNDED = 1 << 30
_OF_INFRASTRUCTURE = frozenset(
    (Reason.ENVIRONMENT_FAILED, Reason.ENGINE_FAILED, Reason.ROLLOUT_TIMEOUT, Reason.SCORER_TIMEOUT)
)


def gold_of(scorer: Scorer, prompt: Prompt) -> tuple[str | None, bool]:
    """Return an answer that is right, and whether the scorer says so itself.

    Without a method `gold` it is the row's field `answer`, which may need another form; None: none
    is known.
    """
    told = getattr(scorer, "gold", None)
    if callable(told):
        return cast("str | None", told(prompt)), True
    answer = prompt.fields.get("answer")
    return (str(answer) if isinstance(answer, str | int | float) else None), False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """A right answer, scored.

    Attributes:
        kind: The row.
        gold: The answer.
        is_told: Whether the scorer itself says that it is right.
        worth: Its reward, in the form that the scorer likes best.
        wrong: The best reward of a wrong answer to this row.
    """

    kind: RowKind
    gold: str
    is_told: bool
    worth: float
    wrong: float


async def _worth(scorer: Scorer, prompt: Prompt, text: str, *, fault_reward: float) -> float:
    try:
        score = scorer(prompt, text)
        if inspect.isawaitable(score):
            score = await score
    except PolicyFault as fault:
        score = score_of_fault(fault, fault_reward)
    return checked_score(score, what="it", made_by=scorer).reward


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """What a policy of a rehearsal was asked, and answers.

    Attributes:
        text: That it answers.
        asked: Tokens of each prompt of who answers first.
        is_cut: Whether the budget of who answers first, or a stop string, cut the answer.
        unwritable: Whether its tokenizer has no tokens for the answer.
    """

    text: str
    asked: list[int] = field(default_factory=list[int])
    is_cut: bool = False
    unwritable: bool = False


class _Speller:
    """A tokenizer that names the text that it has no tokens for."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self.decode = tokenizer.decode

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # noqa: BLE001 - the Rust library raises nothing narrower
            why = f"the model's tokenizer has no tokens for {text[:60]!r} ({error})"
            cure = "say it in characters that the model knows"
            raise AstraflowError(Reason.INVALID_FIELD, f"{why}; {cure}") from None


class _Actor:
    """What an episode needs of an engine; it answers one text."""

    name = "rehearsal"
    version = 0

    def __init__(self, model: SeenModel, said: _Exchange) -> None:
        """Note what is asked from now on.

        Args:
            model: Of the policy.
            said: Notes what it was asked.
        """
        self._model = model
        self._said = said
        self.max_context_token_count = model.max_context or _UNBOUNDED

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, **_: object
    ) -> Generation:
        self._said.asked.append(len(prompt))
        text, written = self._said.text, ()
        ends = [text.index(stop) + len(stop) for stop in sampling.stop_strings if stop in text]
        if ends and min(ends) < len(text):
            text, self._said.is_cut = text[: min(ends)], True
        try:
            written = self._model.tokenizer.encode(text)
        except Exception:  # noqa: BLE001 - the Rust library raises nothing narrower
            self._said.unwritable = True
        tokens = [*written, *self._model.eos_ids[:1]]
        is_cut = len(tokens) > sampling.max_new_tokens > 0
        if is_cut:
            tokens = tokens[: sampling.max_new_tokens]
            self._said.is_cut = True
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            version_spans=(VersionSpan(version=0, length=len(tokens)),) if tokens else (),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rehearsal:
    """A workflow on a data set.

    Attributes:
        subject: Takes what is found.
        workflow: Its name.
        data_set: Its name.
        right: Reward from which on an answer counts as right.
        place: Key that brings the two together.
        is_measured: Whether it is an evaluation.
    """

    subject: Subject
    workflow: str
    data_set: str
    right: float
    place: str
    is_measured: bool

    @property
    def code(self) -> Workflow:
        return self.subject.workflows[self.workflow][0]

    @property
    def scorer(self) -> Scorer | None:
        """None: the workflow scores itself."""
        return self.subject.workflows[self.workflow][1]

    @property
    def fault_reward(self) -> float:
        """What a fault of the policy is worth that does not say it itself."""
        return self.subject.recipe.rollouts.policy_fault_reward

    @property
    def data(self) -> SeenData:
        return self.subject.data[self.data_set]

    @property
    def policies(self) -> Sequence[str]:
        """Those that it samples from."""
        return self.subject.recipe.policies_of(self.workflow)

    @property
    def rows(self) -> Sequence[RowKind]:
        """One row of each kind, and some of the whole data set."""
        reader, kinds = self.data.reader, {kind.row_number: kind for kind in self.data.kinds}
        for at in range(_ROWS):
            index = round(at * (len(reader) - 1) / max(1, _ROWS - 1))
            alone = RowKind(prompt=reader.prompt(index), row_number=index + 1, count=1)
            kinds.setdefault(index + 1, alone)
        return list(kinds.values())

    def row(self, kind: RowKind) -> str:
        """Name a row for people."""
        alike = f" and {kind.count - 1} like it" if kind.count > 1 else ""
        return f"row {kind.row_number} of {self.data_set}{alike}"

    def score(self, scorer: Scorer) -> bool:
        """Score rows; return whether nothing was raised. What was scored before that counts."""
        at: list[RowKind] = []
        scored: list[_Scored] = []

        async def worth_of(kind: RowKind, text: str) -> float:
            return await _worth(scorer, kind.prompt, text, fault_reward=self.fault_reward)

        async def score() -> None:
            for kind in rows:
                at.append(kind)
                gold, is_told = gold_of(scorer, kind.prompt)
                worth = -math.inf
                for form in _FORMS[: 1 if is_told else None] if gold is not None else ():
                    worth = max(worth, await worth_of(kind, form.format(gold)))
                    if worth >= self.right:
                        break
                wrong = max([await worth_of(kind, text) for text in _WRONG])
                if gold is not None:
                    scored.append(
                        _Scored(kind=kind, gold=gold, is_told=is_told, worth=worth, wrong=wrong)
                    )

        where, rows = f"workflows.{self.workflow}.scorer", self.rows
        is_sound = self._goes_well(score, place=where, at=at)
        if is_sound and not scored:
            cure = "give the scorer a method gold(prompt) that returns one"
            what = f"no right answer is known for rows of {self.data_set}"
            self.subject.note(where, what, cure)
        self._worth_faults(scored)
        return is_sound

    def _worth_faults(self, scored: Sequence[_Scored]) -> None:
        """Tell right answers that are not worth it: an error where that holds for every row."""
        low = [each for each in scored if each.worth < self.right]
        if not low:
            return
        first = low[0]
        where = f"workflows.{self.workflow}.scorer"
        what = (
            f"the right answer {first.gold[:60]!r} of {self.row(first.kind)} scores "
            f"{first.worth:g}, not {self.right:g}: {len(low)} of {len(scored)} rows"
        )
        # A penalty on length or the like is no fault in training; nothing to tell answers by is.
        teaches_nothing = all(each.worth <= each.wrong for each in low)
        is_error = len(low) == len(scored) and (
            teaches_nothing or (self.is_measured and first.is_told)
        )
        if not first.is_told:
            cure = (
                "where an answer wants another form, give the scorer a method gold(prompt) that "
                "returns it, or None"
            )
        elif self.is_measured and not teaches_nothing:
            where = f"{self.place}.correct_reward"
            cure = "an answer counts as correct from there on: lower it"
        else:
            cure = "mend the rows, or the scorer's options"
        (self.subject.error if is_error else self.subject.warning)(where, what, cure)

    def _goes_well(
        self,
        run: Callable[[], Coroutine[Any, Any, None]],
        *,
        place: str,
        at: Sequence[RowKind],
    ) -> bool:
        """Run code of a user; return whether nothing came of it, else note what did.

        Args:
            run: Puts each row into `at` before it looks at it.
            place: Key of the code.
            at: The rows that were begun.
        """
        try:
            self.subject.loop.run(run)
        except OvertimeError as late:
            if late.limit_s < self.subject.loop.limit_s or len(at) > 1:
                self.subject.note(
                    place, f"time was up after {max(0, len(at) - 1)} rows of {self.data_set}"
                )
            else:
                self.subject.warning(
                    place,
                    f"took longer than {late.limit_s:g} s on {self.row(at[-1])}",
                    "what computes for long without `await` holds up a node: make it async, or "
                    "name it by `scorer: process`",
                    detail=late.lines,
                )
        except Exception as raised:  # noqa: BLE001 - code of a user raises anything
            self._note_raised(place, raised, self.row(at[-1]))
        else:
            return True
        return False

    def _note_raised(self, where: str, raised: Exception, row: str) -> None:
        subject = self.subject
        lines = user_lines(raised)
        if is_process_refused(raised):
            return subject.note(
                where, "starts processes, which a check does not: it was not run on rows"
            )
        if isinstance(raised, AstraflowError) and raised.__cause__ is None:
            if "agents are let in" in raised.message:
                return subject.note(where, "agents are not rehearsed: it was not run on rows")
            what, _, cure = raised.message.partition("; ")
            if raised.reason in _OF_INFRASTRUCTURE:
                return subject.warning(where, f"{what}, on {row}", cure, detail=lines)
            return subject.error(where, f"{what}, on {row}", cure, detail=lines or raised.cause)
        if isinstance(raised, OSError):
            return subject.warning(where, f"raised {message_of(raised)} on {row}", detail=lines)
        cure = "mend it: in a run this fails a rollout each time"
        if isinstance(raised, KeyError):
            cure = "the row has no such field: mend the row, or the name of the field"
        return subject.error(where, f"raised {message_of(raised)} on {row}", cure, detail=lines)

    async def play(self, prompt: Prompt, text: str) -> _Exchange:
        """Run one episode in which every policy answers a text.

        Raises:
            Exception: What the workflow raised, or what it returned is no score.
        """
        told = _Exchange(text=text)
        recipe, models = self.subject.recipe, self.subject.models
        sampling = {
            PolicyId(name): replace(recipe.policies[name].sampling.params, seed=0)
            for name in self.policies
        }
        task = RolloutTask(
            task_id=TaskId("check"),
            group_id=GroupId("check"),
            purpose=TaskPurpose.TRAIN,
            workflow_id=WorkflowId(self.workflow),
            prompt=prompt,
            sample_indexes=(0,),
            versions={},
            sampling=sampling,
            timeout=timedelta(seconds=recipe.rollouts.timeout_s),
        )
        first = next(iter(sampling))
        ports = {
            name: PolicyPort(
                policy_id=name,
                engine=cast(
                    "Engine",
                    _Actor(models[name], told if name == first else _Exchange(text=text)),
                ),
                tokenizer=_Speller(models[name].tokenizer),
                sampling=each,
                template=models[name].template,
                end_id=next(iter(models[name].eos_ids), None),
            )
            for name, each in sampling.items()
        }
        episode = Episode(task=task, sample_index=0, policies=ports)
        try:
            score = await self.code.run(episode)
        except PolicyFault as fault:
            if not episode.has_sampled:
                raise
            score = score_of_fault(fault, self.fault_reward)
        checked_score(score, what="it", made_by=self.code.run)
        if not episode.trajectories():
            raise RuntimeError("it ended without sampling a token")
        return told

    def rehearse(self) -> bool:
        """Run episodes; return whether nothing was raised."""
        where, rows = f"workflows.{self.workflow}", self.rows
        at: list[RowKind] = []
        golds: list[tuple[RowKind, _Exchange]] = []
        has_turns = False

        async def play_all() -> None:
            nonlocal has_turns
            for kind in rows:
                at.append(kind)
                gold = None
                if self.scorer is not None:
                    gold, _ = gold_of(self.scorer, kind.prompt)
                for text in (*([] if gold is None else [gold]), *_WRONG):
                    try:
                        said = await self.play(kind.prompt, text)
                    except AstraflowError as refused:
                        if refused.reason is Reason.CONTEXT_TOO_LONG:
                            continue  # long rows are counted apart
                        raise
                    has_turns |= any(length > said.asked[0] for length in said.asked)
                    if text == gold:
                        golds.append((kind, said))

        if not self._goes_well(play_all, place=where, at=at):
            return False
        # What a template would make of earlier answers of a chat that goes on after them.
        for policy in self.policies if has_turns else ():
            for rewrite in self.subject.models[policy].template.check.warnings:
                what, _, cure = rewrite.partition(": ")
                self.subject.warning(f"policies.{policy}.model", what, cure)
        self._answer_faults(golds)
        self._length_faults()
        return True

    def _answer_faults(self, golds: Sequence[tuple[RowKind, _Exchange]]) -> None:
        """Look whether the policy can say what is right."""
        policy, *_ = self.policies
        unwritable = [each for each in golds if each[1].unwritable]
        if unwritable:
            kind, told = unwritable[0]
            self.subject.error(
                f"policies.{policy}.model",
                f"its tokenizer cannot write the right answer {told.text[:60]!r} of "
                f"{self.row(kind)}",
                "take a model whose alphabet has it, or other rows",
            )
        cut = [each for each in golds if each[1].is_cut and not each[1].unwritable]
        if cut:
            kind, told = cut[0]
            sampling = self.subject.recipe.policies[policy].sampling
            self.subject.warning(
                f"policies.{policy}.sampling",
                f"the right answer {told.text[:60]!r} of {self.row(kind)} is cut by max_new_tokens "
                f"{sampling.max_new_tokens} or a stop string: {len(cut)} of {len(golds)} rows",
                "raise max_new_tokens, or take out the stop string",
            )

    def _length_faults(self) -> None:
        """Find by bisection how many rows leave no room, and how many too little."""
        subject, recipe, data = self.subject, self.subject.recipe, self.data
        policy, *_ = self.policies
        limit = subject.models[policy].max_context
        if limit is None or recipe.raas.engine.kind == "none":
            return

        @cache
        def length(rank: int) -> int:
            """Return the tokens of the first prompt that a row becomes."""
            prompt = data.reader.prompt(data.longest[rank])
            try:
                asked = subject.loop.run(lambda: self.play(prompt, "")).asked
            except AstraflowError as refused:
                return _UNBOUNDED if refused.reason is Reason.CONTEXT_TOO_LONG else 0
            except Exception:  # noqa: BLE001 - was told on another row, or is of this one alone
                return 0
            return asked[0] if asked else 0

        count, answer = len(data.longest), recipe.policies[policy].sampling.max_new_tokens
        # By bisection: longer texts have more tokens.
        too_long = bisect_left(range(count), 1, key=lambda rank: length(rank) < limit)
        tight = bisect_left(range(count), 1, key=lambda rank: length(rank) + answer <= limit)
        place = f"data.{self.data_set}"
        cure = "leave long rows out with max_prompt_chars, or raise raas.engine.max_context"
        if too_long == count:
            subject.error(place, f"every prompt has more tokens than the context of {limit}", cure)
        elif too_long:
            what = (
                f"about {too_long} of {count} prompts have more tokens than the context of {limit}"
            )
            subject.warning(place, what, cure)
        elif tight:
            subject.warning(
                place,
                f"about {tight} of {count} prompts leave less than the {answer} tokens of "
                f"max_new_tokens in a context of {limit}; the longest has {length(0)}",
                f"{cure}, or lower policies.{policy}.sampling.max_new_tokens",
            )


def check_scorers(subject: Subject) -> None:
    """Have right answers scored, which must be worth it, and wrong ones, which must not raise."""
    for use in _rehearsals(subject):
        if use.scorer is not None and not use.score(use.scorer):
            del subject.workflows[use.workflow]  # it would fail the same way


def check_rehearsals(subject: Subject) -> None:
    """Run workflows on rows of every kind, and on long ones for their length."""
    for use in _rehearsals(subject):
        if all(each in subject.models for each in use.policies) and not use.rehearse():
            del subject.workflows[use.workflow]  # told once


def _rehearsals(subject: Subject) -> Iterator[_Rehearsal]:
    """Yield what there is to rehearse, as far as its code and its data are sound."""
    recipe = subject.recipe
    uses = [
        (recipe.rollouts.workflow, each, 1.0, "rollouts.data_set", False)
        for each in recipe.rollouts.data_sets
    ]
    for suite, settings in recipe.evals.items():
        for index, part in enumerate(settings.data_sets):
            place = f"evals.{suite}.data_sets.{index}"
            uses.append((part.workflow, part.data_set, part.correct_reward, place, True))
    for workflow, data_set, right, place, is_measured in uses:
        if workflow in subject.workflows and data_set in subject.data:
            yield _Rehearsal(
                subject=subject,
                workflow=workflow,
                data_set=data_set,
                right=right,
                place=place,
                is_measured=is_measured,
            )
