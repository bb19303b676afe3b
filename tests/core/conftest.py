"""A run with a pool and trainers that do what they are told, without any process."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

import numpy as np
import pytest

from astraflow.core import effects as ef
from astraflow.core import events as ev
from astraflow.core.batches import BatchOutcome
from astraflow.core.clock import ManualClock
from astraflow.core.errors import Failure, Reason
from astraflow.core.evals import EvalDataSet, EvalSuiteInfo
from astraflow.core.members import (
    Contract,
    JoinPool,
    MemberRole,
    RegisterTrainer,
    Resources,
    ServedPolicy,
    SessionResume,
)
from astraflow.core.packing import laid_out
from astraflow.core.pool.live_members import LiveRaas
from astraflow.core.rollouts import (
    Outcome,
    Payload,
    PayloadColumn,
    Rollout,
    SampleFailure,
    TaskResult,
    VersionSpan,
)
from astraflow.core.run import Run
from astraflow.core.settings import (
    PolicySettings,
    RolloutSettings,
    RunSettings,
    SuiteSettings,
    VersionRelation,
)
from astraflow.core.tasks import Prompt, RegisteredCode, WorkflowSpec
from astraflow.core.tensors import Dtype
from astraflow.core.versions import (
    VersionReport,
    VersionState,
    WeightEndpoint,
)
from made_up import made_up_trajectory, made_up_version

START = datetime(2026, 1, 1, tzinfo=UTC)
CODE = RegisteredCode(name="toy")


def parts_of(sent):
    """Return what a rank makes of the parts that it is sent, but for what lies elsewhere."""
    if sent.parts.has_payloads:
        return tuple(sent.parts)
    return tuple(laid_out(part, sent.header.policy_ids) for part in sent.parts)


def make_settings(
    *,
    policies=("solver",),
    groups_per_batch=2,
    max_staleness=1,
    steps_per_version=1,
    step_count=None,
    group_size=2,
    min_group_size=1,
    suites=(),
    serving=None,
    relation=None,
    takes_payloads=True,
    **rollouts,
):
    return RunSettings(
        run_id="r",
        policies=tuple(
            PolicySettings(
                policy_id=policy,
                groups_per_batch=groups_per_batch,
                max_staleness=max_staleness,
                steps_per_version=steps_per_version,
                step_count=step_count,
                **(serving or {}),
            )
            for policy in policies
        ),
        workflows=(WorkflowSpec(workflow_id="toy", code=CODE, policy_ids=tuple(policies)),),
        rollouts=RolloutSettings(
            workflow_id="toy", group_size=group_size, min_group_size=min_group_size, **rollouts
        ),
        suites=suites,
        relation=relation or VersionRelation(),
        takes_payloads=takes_payloads,
    )


def make_suite(*, policies=("solver",), repeats=1, every=None, at_start=True, at_end=True):
    part = EvalDataSet(
        data_set="held_out", workflow_id="toy", prompt_count=0, repeats=repeats, correct_reward=1.0
    )
    return SuiteSettings(
        suite=EvalSuiteInfo(suite="main", data_sets=(part,), policy_ids=tuple(policies)),
        every=every,
        at_start=at_start,
        at_end=at_end,
    )


def make_trajectory(name, *, policy="solver", versions=(0,), length=None, reward=None):
    spans = tuple(VersionSpan(version=version, length=1) for version in versions)
    prompt_count = 1 if length is None else length - len(spans)
    return made_up_trajectory(name, policy, spans, prompt_count=prompt_count, reward=reward)


def by_reference(trajectory):
    """The same trajectory, its arrays in a payload whose name comes of its own."""
    payload = Payload(
        name=trajectory.trajectory_id.replace("/", "-"),
        digest=bytes(32),
        nbytes=1,
        token_count=trajectory.token_count,
        columns=tuple(
            PayloadColumn(
                name=name,
                axis=each.axis,
                dtype=Dtype.of(each.values.dtype),
                shape=each.values.shape[1:],
            )
            for name, each in trajectory.columns.items()
        ),
    )
    return replace(trajectory, payload=payload)


def make_rollout(
    task, index, *, versions, reward=1.0, outcome=Outcome.SCORED, name=None, made=lambda each: each
):
    """One rollout of a task; `versions` by policy: those that are left out have no trajectory."""
    name = name or f"{task.group_id}/{index}/{task.attempt}"
    is_rewarded = outcome in (Outcome.SCORED, Outcome.TRUNCATED)
    failure = None if is_rewarded else Failure(reason=Reason.ENGINE_FAILED, message="broken")
    return Rollout(
        rollout_id=name,
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=index,
        outcome=outcome,
        reward=reward if is_rewarded else None,
        failure=failure,
        trajectories=tuple(
            made(make_trajectory(f"{name}/{policy}", policy=policy, versions=spans))
            for policy, spans in versions.items()
        ),
    )


class World:
    """A run, its clock, and what the effects put on the streams of its members."""

    def __init__(self, settings, *, prompt_count=None, row_count=None, eval_prompt_count=3):
        self.settings = settings
        self.clock = ManualClock(START)
        self.run = Run(settings, start_time=START)
        self.policies = [policy.policy_id for policy in settings.policies]
        self.tasks = {}  # member -> tasks on its stream, oldest first
        self.cancelled = []
        self.batches = {}  # (member, rank) -> [(header, parts)]
        self.ends = {}  # (member, rank) -> EndOfData
        self.directives = []
        self.orders = []
        self.save_orders = []  # (member, checkpoint)
        self.saved = []
        self.doubts = []
        self.closed = []
        self.recorded = []
        self.batch_lines = []
        self.evals = {}
        self.announced = []
        self.states = []
        self.is_over = False
        self.released = set()  # payloads
        self.goes_on = False  # whether what happens next comes together with what follows
        self.drawn = Counter()
        self.reads_late = False  # whether lost prompts wait in `late` until they are applied
        self.late = []
        self._prompt_count = prompt_count
        self._row_count = row_count
        self._eval_prompt_count = eval_prompt_count
        self._secret = 0

    # --- the hub ---------------------------------------------------------------------

    def apply(self, event):
        decision = self.run.apply(event, self.clock.now(), goes_on=self.goes_on)
        follow_ups = []
        for effect in decision.effects:
            follow_ups += self._carry_out(effect) or []
        for follow_up in follow_ups:
            self.apply(follow_up)
        return decision.answer

    def _carry_out(self, effect):
        match effect:
            case ef.SendTask():
                self.tasks.setdefault(effect.member_id, []).append(effect.task)
            case ef.SendCancellation():
                self.cancelled.append(effect)
            case ef.SendBatch():
                key = (effect.member_id, effect.rank)
                self.batches.setdefault(key, []).append((effect.header, parts_of(effect)))
            case ef.SendEndOfData():
                assert (effect.member_id, effect.rank) not in self.ends
                self.ends[effect.member_id, effect.rank] = effect.end_of_data
            case ef.SendDirective():
                self.directives.append(effect)
            case ef.SendPublishOrder():
                self.orders.append(effect.member_id)
            case ef.SendScrubOrder():
                self.doubts.append(effect)
            case ef.SendSaveOrder():
                self.save_orders.append((effect.member_id, effect.checkpoint_id))
            case ef.RunSaved():
                self.saved.append(effect.saved)
            case ef.ClearOutbox():
                self.tasks.pop(effect.member_id, None)
            case ef.CloseSession():
                self.closed.append(effect)
                self.tasks.pop(effect.member_id, None)
            case ef.DrawPrompts():
                return [self._draw(effect.data_set, effect.count)]
            case ef.DrawAgain():
                again = self._draw_again(effect.prompts)
                return self.late.append(again) if self.reads_late else [again]
            case ef.DrawEvalPrompts():
                rows = ev.EvalPromptsOffered(
                    eval_run_id=effect.eval_run_id,
                    prompts={
                        name: tuple(
                            Prompt(prompt_id=f"e{i}", data_set=name, fields={})
                            for i in range(self._eval_prompt_count)
                        )
                        for name in effect.data_sets
                    },
                )
                return self.late.append(rows) if self.reads_late else [rows]
            case ef.RecordRollout():
                self.recorded.append(effect)
            case ef.RecordBatch():
                self.batch_lines.append(effect)
            case ef.EvalChanged():
                self.evals[effect.eval_run.eval_run_id] = effect.eval_run
            case ef.AnnounceVersion():
                self.announced.append(effect.info)
            case ef.RunStateChanged():
                self.states.append(effect.state)
            case ef.ReleasePayloads():
                assert self.released.isdisjoint(effect.names)
                self.released.update(effect.names)
            case ef.CloseHub():
                assert not self.is_over
                self.is_over = True
        return None

    def _draw(self, data_set, count):
        drawn = self.drawn[data_set]
        if self._prompt_count is not None:
            count = min(count, self._prompt_count - drawn)
        prompts = tuple(self._prompt(data_set, number) for number in range(drawn, drawn + count))
        self.drawn[data_set] += count
        is_last = self.drawn[data_set] == self._prompt_count
        return ev.PromptsOffered(prompts=prompts, data_set=data_set, is_last=is_last)

    def _draw_again(self, issued):
        """Read what was lost once more, as a hub does that knows its data sets."""
        drawn = {
            (prompt.data_set, prompt.epoch, prompt.prompt_id): prompt
            for name, count in self.drawn.items()
            for prompt in (self._prompt(name, number) for number in range(count))
        }
        prompts = tuple(drawn[each.data_set, each.epoch, each.prompt_id] for each in issued)
        return ev.PromptsOffered(prompts=prompts, is_again=True)

    def _prompt(self, data_set, number):
        """Rows by number; with a row_count they come again in the next epoch."""
        epoch, row = divmod(number, self._row_count or 1 << 62)
        name = f"p{row}" if data_set == "train" else f"{data_set}/{row}"
        return Prompt(prompt_id=name, data_set=data_set, epoch=epoch, fields={"number": number})

    def tick(self, seconds=0.0):
        self.clock.advance(seconds)
        self.apply(ev.Ticked())

    def secrets(self):
        self._secret += 1
        return ev.SessionSecrets(token=f"s{self._secret}".encode(), transfer_token=b"t")

    # --- members ---------------------------------------------------------------------

    def join(self, name="node", *, credit=16, resumes=None, incarnation=1, held=(), **changes):
        resume = None
        if resumes:
            resume = SessionResume(
                resume_token=b"s", incarnation=incarnation, held_task_ids=tuple(held)
            )
        served = tuple(
            ServedPolicy(policy_id=policy, max_context_token_count=64) for policy in self.policies
        )
        request = JoinPool(
            name=name, contract=Contract(), capacity=max(1, credit), policies=served, codes=(CODE,)
        )
        request = replace(request, resume=resume, **changes)
        event = ev.RaasJoined(request=request, secrets=self.secrets(), resumes=resumes)
        membership = self.apply(event)
        member = membership.session.member_id
        if credit:
            self.credit(member, credit)
        return member

    def credit(self, member, count, **more):
        self.apply(ev.TaskCredit(member_id=member, max_outstanding=count, **more))

    def register(self, policy="solver", *, resumes=None, incarnation=1, held=(), **changes):
        resume = None
        if resumes:
            resume = SessionResume(
                resume_token=b"s", incarnation=incarnation, held_batch_ids=tuple(held)
            )
        settings = next(p for p in self.settings.policies if p.policy_id == policy)
        request = RegisterTrainer(
            policy_id=policy,
            name=f"trainer of {policy}",
            contract=Contract(),
            groups_per_batch=settings.groups_per_batch,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint=f"{policy}:1"),),
        )
        request = replace(request, resume=resume, **changes)
        event = ev.TrainerRegistered(request=request, secrets=self.secrets(), resumes=resumes)
        return self.apply(event).session.member_id

    def open_stream(self, trainer, *, rank=0, **more):
        self.batches.pop((trainer, rank), None)
        self.ends.pop((trainer, rank), None)
        self.apply(ev.StreamBatches(member_id=trainer, rank=rank, **more))

    def publish(self, trainer, policy="solver", *, version=None, step=None, digest=None):
        if version is None:
            newest = self.policy(policy).version
            version = 0 if newest is None else newest + 1
        content = (digest or f"{policy}{version}".encode()).ljust(16, b"-")
        step = version if step is None else step
        info = made_up_version(policy, version, step=step, content=content)
        return self.apply(ev.VersionPublished(member_id=trainer, info=info))

    def report(self, member, version, policy="solver", state=VersionState.LIVE, **changes):
        report = VersionReport(policy_id=policy, version=version, state=state, **changes)
        self.apply(ev.VersionReported(member_id=member, report=report))

    def ask(self, member, policy="solver"):
        return self.apply(ev.PublishRequested(member_id=member, policy_id=policy))

    def keep_alive(self, member):
        return self.apply(ev.MemberKeptAlive(member_id=member))

    def leave(self, member):
        self.apply(ev.MemberLeft(member_id=member))

    # --- work ------------------------------------------------------------------------

    def live(self, member):
        """Version of each policy that a RaaS serves."""
        status = self.run.status(self.clock.now())
        return next(dict(m.versions) for m in status.members if m.member_id == member)

    def pop_task(self, member):
        return self.tasks[member].pop(0)

    def send(self, member, task, index, *, versions=None, **more):
        if versions is None:
            live = self.live(member)
            pins = {p: bounds.max for p, bounds in task.versions.items()}
            versions = {p: (live[p] if pins[p] is None else pins[p],) for p in task.versions}
        rollout = make_rollout(task, index, versions=versions, **more)
        return self.apply(ev.RolloutArrived(member_id=member, rollout=rollout))

    def finish(self, member, task, *, failures=()):
        result = TaskResult(
            task_id=task.task_id,
            rollout_count=len(task.sample_indexes) - len(failures),
            failures=tuple(SampleFailure(sample_index=i, failure=f) for i, f in failures),
        )
        return self.apply(ev.TaskFinished(member_id=member, result=result))

    def work(self, member, count=None, **more):
        """Do tasks that are out now, the first ones if only some; return how many."""
        done = 0
        while self.tasks.get(member) and done != count:
            task = self.pop_task(member)
            for index in task.sample_indexes:
                self.send(member, task, index, **more)
            self.finish(member, task)
            done += 1
        return done

    def ack(self, trainer, batch_id, outcome=BatchOutcome.CONSUMED, **more):
        return self.apply(
            ev.AckBatch(member_id=trainer, batch_id=batch_id, outcome=outcome, **more)
        )

    def pop_batch(self, trainer, rank=0):
        return self.batches[trainer, rank].pop(0)

    def train(self, trainer, policy="solver"):
        """Train on the next batch: publish, then acknowledge."""
        header, _ = self.pop_batch(trainer)
        step = self.policy(policy).step + 1
        self.publish(trainer, policy, step=step)
        self.ack(trainer, header.batch_id, step=step)
        return header

    def started(self, *, credit=16, **stream):
        """Bring up a trainer and one RaaS on version 0."""
        trainers = [self.register(policy) for policy in self.policies]
        for trainer, policy in zip(trainers, self.policies, strict=True):
            self.publish(trainer, policy)
            self.open_stream(trainer, **stream)
        node = self.join(credit=credit)
        for policy in self.policies:
            self.report(node, 0, policy)
        return (trainers[0] if len(trainers) == 1 else trainers), node

    # --- views -----------------------------------------------------------------------

    def policy(self, policy="solver"):
        status = self.run.status(self.clock.now())
        return next(p for p in status.policies if p.policy_id == policy)

    def account(self, policy="solver"):
        return next(a for a in self.run.accounts() if a.policy_id == policy)

    @property
    def state(self):
        return self.run.status(self.clock.now()).state


@pytest.fixture(scope="session")
def make_world():
    """Build a world: settings as in make_settings; prompt_count (of each data set), row_count."""

    def build(*, prompt_count=None, row_count=None, eval_prompt_count=3, **settings):
        return World(
            make_settings(row_count=row_count or 1, **settings),
            prompt_count=prompt_count,
            row_count=row_count,
            eval_prompt_count=eval_prompt_count,
        )

    return build


_PLAIN = {str, bytes, int, float, bool, type(None), datetime, timedelta}


def picture(thing, seen=None, *, is_value=False):
    """Everything that a state holds, as text: equal for equal states, whoever shares a value."""
    if type(thing) in _PLAIN or isinstance(thing, (str, bytes, int, float)):
        return repr(thing)
    seen = {} if seen is None else seen
    if isinstance(thing, np.ndarray):
        return f"{thing.dtype}{thing.tolist()}"
    if not is_value and not _is_frozen(type(thing)):
        if id(thing) in seen:
            return f"@{seen[id(thing)]}"
        seen[id(thing)] = len(seen)
    return f"{type(thing).__name__}({', '.join(_parts(thing, seen))})"


@cache
def _is_frozen(kind):
    params = getattr(kind, "__dataclass_params__", None)
    return issubclass(kind, (tuple, frozenset)) or bool(params and params.frozen)


@cache
def _slots(kind):
    slots = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    # The message that something came in says what the others do.
    return tuple(name for name in dict.fromkeys(slots) if name != "received")


def _parts(thing, seen):
    if isinstance(thing, (set, frozenset)):
        return [picture(part, seen) for part in sorted(thing, key=repr)]
    if isinstance(thing, Mapping):
        return [f"{picture(k, seen)}: {picture(v, seen)}" for k, v in thing.items()]
    if isinstance(thing, (list, tuple, deque)):
        return [picture(part, seen) for part in thing]
    held = {name: getattr(thing, name, None) for name in _slots(type(thing))}
    held |= getattr(thing, "__dict__", {})
    held.pop("apply", None)
    is_frozen = _is_frozen(type(thing))
    return [
        f"{name}={picture(value, seen, is_value=is_frozen and isinstance(value, Mapping))}"
        for name, value in held.items()
    ]


@pytest.fixture
def picture_of():
    return picture


@pytest.fixture(scope="session")
def make_raas():
    """Build a RaaS that nobody knows yet."""

    def build(name="n", **more):
        return LiveRaas(
            member_id=name,
            name=name,
            role=MemberRole.RAAS,
            incarnation=1,
            region="",
            resources=Resources(),
            join_time=START,
            keep_alive_time=START,
            policies={},
            **more,
        )

    return build


@pytest.fixture(scope="session")
def suite():
    return make_suite


@pytest.fixture
def trajectory():
    return make_trajectory


@pytest.fixture
def rollout_of():
    return make_rollout


@pytest.fixture
def minute():
    return timedelta(minutes=1)


@pytest.fixture
def referenced():
    """The same trajectory, its arrays in a payload."""
    return by_reference
