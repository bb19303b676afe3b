"""The laws of the house, under whatever members do in whatever order."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from astraflow.core import effects as ef
from astraflow.core import events as ev
from astraflow.core.algorithms.points import PromptSelector
from astraflow.core.batches import BatchOutcome
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.members import MemberState
from astraflow.core.rollouts import Disposition, Outcome
from astraflow.core.run import Run
from astraflow.core.settings import (
    BufferOrder,
    BufferSettings,
    MixPhaseSettings,
    PlugInSpec,
    RelationKind,
    ReplaySettings,
    VersionRelation,
)
from astraflow.core.status import RunState
from astraflow.core.versions import VersionState
from astraflow.wire.journal import read_record, record_bytes
from astraflow.wire.snapshot import dump_state, load_state

OURS = ("astraflow.core.",)
_LOOK_EVERY = 97
ENGINE = Failure(reason=Reason.ENGINE_FAILED, message="broken")
DRAINING = Failure(reason=Reason.MEMBER_DRAINING)
picks = st.integers(0, 7)


@pytest.fixture
def laws(make_world, suite, rollout_of, picture_of):
    class Laws(RuleBasedStateMachine):
        compositions = st.just({})

        def __init__(self):
            super().__init__()
            self.world = None

        @initialize(
            policies=st.sampled_from([("solver",), ("solver", "verifier")]),
            max_staleness=st.integers(0, 2),
            steps_per_version=st.sampled_from([1, 1, 3, None]),
            group_size=st.integers(1, 3),
            prompt_count=st.one_of(st.none(), st.integers(0, 12)),
            step_count=st.integers(2, 8),
            has_eval=st.booleans(),
            is_hasty=st.booleans(),
            sends_lots=st.booleans(),
            relation=st.sampled_from(RelationKind),
            data=st.data(),
        )
        def start(
            self,
            policies,
            max_staleness,
            steps_per_version,
            group_size,
            prompt_count,
            step_count,
            has_eval,
            is_hasty,
            sends_lots,
            relation,
            data,
        ):
            self.composition = data.draw(self.compositions)
            self.is_hasty = is_hasty
            self.sends_lots = sends_lots
            self.was_given_up = False
            self.left_behind = []  # (member, task, samples not sent) of sessions that ended
            suites = (suite(policies=policies, every=2),) if has_eval else ()
            self.world = make_world(
                policies=policies,
                max_staleness=max_staleness,
                steps_per_version=steps_per_version,
                group_size=group_size + bool(self.composition),
                step_count=step_count,
                prompt_count=prompt_count,
                suites=suites,
                max_failed_groups=1000,
                **composed(self.composition, max_staleness),
                relation=VersionRelation(kind=relation, timeout=timedelta(seconds=20)),
            )
            self.max_staleness = max_staleness
            self.steps_per_version = steps_per_version
            self.events = []
            self.effects = []
            self.digests = []
            self.looks = {}  # events -> what the state was after them
            self.credit = {}
            self.nodes = {}  # member -> task id -> (task, samples not sent)
            self.incarnations = Counter()
            self.begun = {}  # task id -> what its node served when it came
            self.trainers = {}  # policy -> member
            self.held = {}  # policy -> [(header, parts)] in the trainer's hands
            self.lost = {}  # policy -> batches whose session ended
            self.steps = Counter()
            self.consumed = {policy: set() for policy in policies}
            self.lineages = {policy: [] for policy in policies}  # (step, rollouts) per batch
            self.counted = set()  # batches that counted after their session had ended
            self.sent = []
            self._listen()
            for policy in policies:
                self.trainers[policy] = self.world.register(policy)
                self.held[policy], self.lost[policy] = [], []
                self.world.publish(self.trainers[policy], policy)
                self.world.open_stream(self.trainers[policy], max_outstanding=2)
            self.join(6)
            self.join(6)

        def _listen(self):
            """Write down every event and its effects, and look at each task that is sent."""
            run, apply = self.world.run, self.world.run.apply

            def listening(event, now, *, goes_on):
                refusal = refusal_by(run, event)
                before = repeats_of(run) if refusal else None
                decision = apply(event, now, goes_on=goes_on)
                if refusal:
                    assert decision.answer == refusal.ack
                    before.update(refusal.event.policy_ids if refusal.event else ())
                    assert repeats_of(run) == before
                self.events.append((event, now, goes_on))
                self.effects.append(decision.effects)
                self.digests.append(decision.digest)
                if len(self.events) % _LOOK_EVERY == 0:
                    self.looks[len(self.events)] = picture_of(run)
                for effect in decision.effects:
                    self._look_at(effect)
                return decision

            run.apply = listening

        def _look_at(self, effect):
            if isinstance(effect, ef.ClearOutbox) and effect.member_id in self.nodes:
                self.world.tasks.pop(effect.member_id, None)
            if isinstance(effect, ef.CloseSession):
                held = self.nodes.pop(effect.member_id, {})
                self.left_behind += [(effect.member_id, *each) for each in held.values()]
            if isinstance(effect, ef.SendTask):
                tasks = self.nodes.setdefault(effect.member_id, {})
                tasks[effect.task.task_id] = (effect.task, set(effect.task.sample_indexes))
                self.begun[effect.task.task_id] = self.world.live(effect.member_id)

        # --- nodes

        def node(self, pick):
            names = sorted(self.nodes)
            return names[pick % len(names)] if names else None

        def task(self, member, pick):
            tasks = self.nodes.get(member, {})
            names = sorted(tasks)
            return tasks[names[pick % len(names)]] if names else None

        @rule(credit=st.integers(0, 6))
        def join(self, credit):
            if len(self.nodes) < 3 and self.world.run.status(self.world.clock.now()).state not in (
                RunState.DONE,
                RunState.FAILED,
            ):
                member = self.world.join(f"node{len(self.events)}", credit=credit)
                self.nodes.setdefault(member, {})
                self.incarnations[member] = 1
                for policy in self.world.policies:
                    self.report(member, policy)

        def report(self, member, policy):
            newest = len(self.world.run.versions(policy)) - 1
            if newest >= 0:
                self.world.report(member, newest, policy)

        @rule(pick=picks)
        def node_updates(self, pick):
            member = self.node(pick)
            if member:
                for policy in self.world.policies:
                    self.report(member, policy)

        @rule(pick=picks)
        def node_fails_to_update(self, pick):
            member = self.node(pick)
            if member:
                self.world.report(member, 0, state=VersionState.FAILED)

        @rule(pick=picks, credit=st.integers(0, 6), extra=st.integers(0, 2))
        def node_changes_credit(self, pick, credit, extra):
            member = self.node(pick)
            if member:
                self.world.credit(member, credit, max_eval_extra=extra)

        @rule(
            pick=picks,
            which=picks,
            outcome=st.sampled_from(
                [Outcome.SCORED] * 6
                + [Outcome.INFRA_ERROR, Outcome.SCORER_FAILED, Outcome.RETURNED]
            ),
            reward=st.sampled_from([0.0, 1.0]),
            is_partial=st.booleans(),
        )
        def node_sends_rollout(self, pick, which, outcome, reward, is_partial):
            member = self.node(pick)
            found = self.task(member, which)
            if not found or not found[1]:
                return
            task, left = found
            index = min(left)
            left.discard(index)
            versions = self.versions(member, task)
            if is_partial and len(versions) > 1:
                versions.popitem()
            rollout = rollout_of(task, index, versions=versions, outcome=outcome, reward=reward)
            ack = self.world.apply(ev.RolloutArrived(member_id=member, rollout=rollout))
            assert ack.disposition is not Disposition.REJECTED
            self.sent.append((member, rollout, ack.disposition))

        @precondition(lambda self: self.world and self.sent)
        @rule(pick=picks)
        def node_repeats_itself(self, pick):
            member, rollout, disposition = self.sent[-1 - pick % len(self.sent)]
            if member not in self.nodes or disposition is not Disposition.ACCEPTED:
                return
            before = [account.trained_count for account in self.world.run.accounts()]
            accepted = len(self.world.recorded)
            ack = self.world.apply(ev.RolloutArrived(member_id=member, rollout=rollout))
            if rollout.outcome in (Outcome.SCORED, Outcome.SCORER_FAILED):
                assert ack.disposition in (Disposition.DUPLICATE, Disposition.DROPPED)
                assert len(self.world.recorded) == accepted
            assert [a.trained_count for a in self.world.run.accounts()] == before

        @rule(pick=picks, count=st.integers(1, 8))
        def node_works(self, pick, count):
            """Tasks are done newest first, so that old ones turn stale."""
            for _ in range(count):
                member = self.node(pick)
                if member and self.nodes[member]:
                    self.do(member, list(self.nodes[member])[-1])

        @rule(count=st.integers(1, 4), is_ack_first=st.booleans())
        def all_but_the_oldest_task_go_on(self, count, is_ack_first):
            for _ in range(count):
                oldest = min(
                    (int(name.split("-")[-1]), name) for name in self.all_tasks() or ["task-r-0"]
                )[1]
                for member in list(self.nodes):
                    for task_id in list(self.nodes[member]):
                        if task_id != oldest:
                            self.do(member, task_id)
                for pick in range(len(self.trainers)):
                    self.trainer_trains(pick, is_ack_first)
                for pick in range(len(self.nodes)):
                    self.node_updates(pick)

        def versions(self, member, task):
            """A rollout is sampled from what its node served when it began, and serves now.

            A hasty node does not wait for the version that the task asks for.
            """
            live, begun = self.world.live(member), self.begun[task.task_id]
            versions = {}
            for policy, bounds in task.versions.items():
                wanted = 0 if self.is_hasty else bounds.min or 0
                first = min(max(begun.get(policy, 0), wanted), live.get(policy, 0))
                is_pinned = bounds.max is not None
                versions[policy] = (bounds.max,) if is_pinned else (first, live.get(policy, 0))
            return versions

        def all_tasks(self):
            return [task_id for tasks in self.nodes.values() for task_id in tasks]

        @rule(pick=picks, which=picks)
        def node_finishes_task(self, pick, which):
            member = self.node(pick)
            found = self.task(member, which)
            if not found:
                return
            task, left = found
            del self.nodes[member][task.task_id]
            failures = tuple((index, ENGINE) for index in sorted(left))
            assert self.world.finish(member, task, failures=failures).disposition == "accepted"
            assert self.world.finish(member, task).disposition is Disposition.DUPLICATE

        @rule(pick=picks, which=picks, failure=st.sampled_from([ENGINE, DRAINING]))
        def node_gives_task_back(self, pick, which, failure):
            member = self.node(pick)
            found = self.task(member, which)
            if found and len(found[1]) == len(found[0].sample_indexes):
                del self.nodes[member][found[0].task_id]
                nack = ev.TaskNacked(member_id=member, task_id=found[0].task_id, failure=failure)
                self.world.apply(nack)

        @rule(pick=picks)
        def node_leaves(self, pick):
            member = self.node(pick)
            if member:
                self.world.leave(member)

        @rule(pick=picks, is_new=st.booleans())
        def node_comes_back(self, pick, is_new):
            member = self.node(pick)
            if not member or self.world.state.is_final:
                return
            self.incarnations[member] += is_new
            held = [] if is_new else sorted(self.nodes[member])[:1]
            kept = {name: self.nodes[member][name] for name in held}
            self.nodes[member] = kept
            self.world.join(
                f"back{len(self.events)}",
                credit=4,
                resumes=member,
                incarnation=self.incarnations[member],
                held=held,
            )
            assert held == [] or self.nodes[member].keys() >= set(held)
            for policy in self.world.policies:
                self.report(member, policy)

        @precondition(lambda self: self.world and self.left_behind)
        @rule(pick=picks)
        def node_sends_what_it_had_when_its_session_ended(self, pick):
            member, task, left = self.left_behind.pop(pick % len(self.left_behind))
            if member in self.nodes or self.world.state.is_final or not left:
                return
            self.incarnations[member] += 1
            name = f"late{len(self.events)}"
            number = self.incarnations[member]
            self.world.join(name, credit=4, resumes=member, incarnation=number)
            self.nodes.setdefault(member, {})
            for policy in self.world.policies:
                self.report(member, policy)
            rollout = rollout_of(task, min(left), versions=self.versions(member, task))
            before = [account.is_balanced for account in self.world.run.accounts()]
            for _ in range(2):
                ack = self.world.apply(ev.RolloutArrived(member_id=member, rollout=rollout))
            assert ack.disposition is not Disposition.ACCEPTED
            assert [account.is_balanced for account in self.world.run.accounts()] == before

        @rule(pick=picks, seconds=st.integers(1, 11))
        def time_passes(self, pick, seconds):
            """All but one member keep their sessions."""
            silent = self.node(pick)
            self.world.clock.advance(seconds)
            for member in [*self.nodes, *self.trainers.values()]:
                if member != silent:
                    self.keep(member)
            self.tick()

        def keep(self, member):
            try:
                self.world.keep_alive(member)
            except AstraflowError as error:
                assert error.reason is Reason.SESSION_ENDED  # noqa: PT017 - may pass as well

        def tick(self):
            closed = len(self.world.closed)
            self.world.tick()
            for close in self.world.closed[closed:]:
                self.forget_trainer(close.member_id)

        @rule()
        def tasks_expire(self):
            for _ in range(40):
                self.world.clock.advance(7)
                for member in [*self.nodes, *self.trainers.values()]:
                    self.keep(member)
                self.tick()

        @rule(seconds=st.sampled_from([1, 100, 10_000]))
        def hub_is_gone_for_a_while(self, seconds):
            """Nobody is silent by that, and nothing fails."""
            before = self.members, [account.drops for account in self.world.run.accounts()]
            self.world.clock.advance(seconds)
            # One of a run that is over closes as the one before it did.
            self.world.is_over = False
            self.world.apply(ev.HubRestarted())
            self.tick()
            drops = [account.drops for account in self.world.run.accounts()]
            assert (self.members, drops) == before

        @property
        def members(self):
            status = self.world.run.status(self.world.clock.now())
            return {each.member_id for each in status.members}

        # --- trainers

        def policy(self, pick):
            names = sorted(self.trainers)
            return names[pick % len(names)] if names else None

        def forget_trainer(self, member):
            for policy, trainer in list(self.trainers.items()):
                if trainer == member:
                    del self.trainers[policy]
                    self.lost[policy] += self.held[policy]
                    self.held[policy] = []

        def receive(self, policy):
            stream = self.world.batches.get((self.trainers[policy], 0), [])
            self.held[policy] += stream
            stream.clear()

        @rule(pick=picks, is_ack_first=st.booleans())
        def trainer_trains(self, pick, is_ack_first):
            policy = self.policy(pick)
            if policy is None:
                return
            self.receive(policy)
            if not self.held[policy]:
                self.publish_if_ordered(policy)
                return
            header, parts = self.held[policy].pop(0)
            trainer = self.trainers[policy]
            newest = self.world.policy(policy).version
            for part in parts:
                assert (part.values("min_versions") >= newest - self.max_staleness).all()
            step = self.world.policy(policy).step + 1
            self.count_consumed(policy, parts, step)
            if not is_ack_first:
                self.publish_if_due(policy, step)
            name = dict(self.world.save_orders).get(trainer, "")
            assert self.world.ack(trainer, header.batch_id, step=step, checkpoint_id=name)
            if is_ack_first and policy in self.trainers:
                self.publish_if_due(policy, step)
            assert self.world.ack(trainer, header.batch_id, step=step, checkpoint_id=name)
            if policy in self.trainers and not self.held_by(policy):
                self.publish_if_ordered(policy)

        def publish_if_ordered(self, policy):
            """What a trainer does that has no batch."""
            if self.world.run._components.policies[policy].progress.is_ordered:
                step = self.world.policy(policy).step
                self.world.publish(self.trainers[policy], policy, step=step)

        def publish_if_due(self, policy, step):
            """What a trainer does after a step: a version that is due, or was asked for."""
            state = self.world.run._components.policies[policy]
            done = step - state.versions.newest.step
            if state.progress.is_ordered or done >= (self.steps_per_version or 1 << 30):
                self.world.publish(self.trainers[policy], policy, step=step)

        @rule(pick=picks, which=picks)
        def node_asks_for_a_version(self, pick, which):
            member, policy = self.node(pick), self.policy(which)
            if member is None or policy is None:
                return
            before = self.world.policy(policy).version
            answer = self.world.ask(member, policy)
            assert answer.newest_version == before
            if answer.is_pending and not self.held_by(policy):
                self.publish_if_ordered(policy)
                assert not self.world.ask(member, policy).is_pending

        def held_by(self, policy):
            self.receive(policy)
            return self.held[policy]

        def count_consumed(self, policy, parts, step):
            before = set(self.consumed[policy])
            for part in parts:
                uses = part.values("use_count").tolist()
                named = set(zip(part.rollout_ids, uses, strict=True))
                new = {name for name, count in named if not count}
                assert not new & self.consumed[policy]
                assert {name for name, count in named if count} <= self.consumed[policy]
                self.consumed[policy] |= new
            self.lineages[policy].append((step, self.consumed[policy] - before))

        @rule(pick=picks, outcome=st.sampled_from([BatchOutcome.RETURNED, BatchOutcome.DISCARDED]))
        def trainer_gives_batch_back(self, pick, outcome):
            policy = self.policy(pick)
            if policy is None:
                return
            self.receive(policy)
            if self.held[policy]:
                # The last one: what stays in the trainer's hands keeps its place.
                header, _ = self.held[policy].pop()
                assert self.world.ack(self.trainers[policy], header.batch_id, outcome)

        @rule(pick=picks)
        def trainer_reopens_stream(self, pick):
            policy = self.policy(pick)
            if policy is None:
                return
            self.receive(policy)
            held = [header.batch_id for header, _ in self.held[policy]]
            self.world.open_stream(self.trainers[policy], max_outstanding=2)
            again = self.world.batches.get((self.trainers[policy], 0), [])
            assert [header.batch_id for header, _ in again[: len(held)]] == held
            self.held[policy] = []

        @rule(pick=picks, is_ended=st.booleans())
        def trainer_starts_again(self, pick, is_ended):
            policy = self.policy(pick)
            if policy is None or self.world.state.is_final:
                return
            self.receive(policy)
            old = self.trainers[policy]
            self.world.leave(old)
            self.forget_trainer(old)
            steps = self.world.policy(policy).step
            trainer = self.world.register(policy, last_step=steps)
            self.trainers[policy] = trainer
            self.world.open_stream(trainer, max_outstanding=2)

        @rule(pick=picks, back=st.integers(1, 4))
        def trainer_comes_back_older(self, pick, back):
            policy = self.policy(pick)
            if policy is None or self.world.state.is_final:
                return
            self.receive(policy)
            old = self.trainers[policy]
            self.world.leave(old)
            self.forget_trainer(old)
            self.lost[policy] = []
            lineage = self.lineages[policy]
            undone = lineage[-back:]
            kept = lineage[:-back]
            step = kept[-1][0] if kept else 0
            is_ended = self.world.run._components.policies[policy].end is not None
            trainer = self.world.register(policy, last_step=step)
            if not is_ended:
                self.lineages[policy] = kept
                self.consumed[policy] -= set().union(*(rollouts for _, rollouts in undone))
            # The version that restores the weights is one that the others did not make.
            self.was_given_up = True
            self.trainers[policy] = trainer
            # Of a policy that has ended nothing is undone.
            done = self.world.policy(policy).step if is_ended else step
            self.world.publish(trainer, policy, step=done)
            self.world.open_stream(trainer, max_outstanding=2)

        @rule(pick=picks)
        def trainer_acks_what_it_lost(self, pick):
            policy = self.policy(pick)
            if policy is None or not self.lost[policy]:
                return
            header, parts = self.lost[policy].pop()
            self.receive(policy)
            before = self.world.account(policy).trained_count
            try:
                self.world.ack(self.trainers[policy], header.batch_id)
            except AstraflowError as error:
                assert error.reason is Reason.LEASE_LOST  # noqa: PT017 - may pass as well
                assert self.world.account(policy).trained_count == before
            else:
                trained = self.world.account(policy).trained_count - before
                rollouts = {name for part in parts for name in part.rollout_ids}
                assert trained <= len(rollouts)
                step = self.world.policy(policy).step
                if header.batch_id in self.counted:
                    return
                self.counted.add(header.batch_id)
                self.lineages[policy].append((step, rollouts - self.consumed[policy]))
                self.consumed[policy] |= rollouts

        # --- operators

        @rule(is_paused=st.booleans())
        def operator_pauses(self, is_paused):
            self.world.apply(ev.RunPaused() if is_paused else ev.RunResumed())

        @rule(name=st.sampled_from("ab"))
        def operator_saves(self, name):
            try:
                self.world.apply(ev.SaveRequested(checkpoint_id=name))
            except AstraflowError as error:
                assert error.reason in (Reason.NOT_READY, Reason.RUN_ENDED)  # noqa: PT017

        @rule(name=st.sampled_from("ab"))
        def operator_evaluates(self, name):
            if self.world.settings.suites:
                try:
                    self.world.apply(ev.EvalCreated(request_id=name, suite="main"))
                except AstraflowError as error:
                    expected = (Reason.RUN_ENDED, Reason.REQUEST_CONFLICT)
                    assert error.reason in expected  # noqa: PT017 - may pass as well

        @rule(pick=picks)
        def operator_cancels_eval(self, pick):
            names = sorted(self.world.evals)
            if names:
                name = names[pick % len(names)]
                self.world.apply(ev.EvalCancelled(eval_run_id=name))

        # --- laws

        @invariant()
        def books_add_up(self):
            if self.world:
                for account in self.world.run.accounts():
                    assert account.is_balanced

        @invariant()
        def open_groups_are_bounded(self):
            if self.world:
                for policy in self.world.run.status(self.world.clock.now()).policies:
                    bound = (self.max_staleness + 1) * 2 * (self.steps_per_version or 1)
                    assert 0 <= policy.open_group_count <= bound

        @invariant()
        def policies_keep_their_distance(self):
            """Somebody who was given up may be left behind."""
            if self.world:
                components = self.world.run._components
                most = components.settings.relation.max_lead
                if most is None or components.pacing._barrier.given_up or self.was_given_up:
                    self.was_given_up = True
                    return
                live = [policy for policy in components.policies.values() if policy.end is None]
                versions = [policy.progress.made_version for policy in live]
                assert max(versions, default=0) - min(versions, default=0) <= most

        @invariant()
        def leased_is_never_too_old(self):
            if self.world:
                for line in self.world.batch_lines:
                    assert line.metrics["lag/max"] <= self.max_staleness

        def teardown(self):
            if self.world:
                self.drive_to_the_end()
                self.replay()

        def drive_to_the_end(self):
            world = self.world
            world.apply(ev.RunResumed())
            self.lost = {policy: [] for policy in self.lost}
            for member in world.run.status(world.clock.now()).members:
                if member.state is MemberState.DRAINING:
                    world.leave(member.member_id)
            for turn in range(400):
                if world.state.is_final:
                    break
                if not turn % 20:
                    self.join(6)
                    for member in self.nodes:
                        world.credit(member, 6)
                for policy in world.policies:
                    if policy not in self.trainers:
                        steps = world.policy(policy).step
                        self.trainers[policy] = world.register(policy, last_step=steps)
                        world.open_stream(self.trainers[policy], max_outstanding=2)
                for member in list(self.nodes):
                    for policy in world.policies:
                        self.report(member, policy)
                    for task_id in list(self.nodes.get(member, {})):
                        self.do(member, task_id)
                for pick in range(len(self.trainers)):
                    self.trainer_trains(pick, is_ack_first=False)
                world.clock.advance(2)
                for member in [*self.nodes, *self.trainers.values()]:
                    self.keep(member)
                self.tick()
            assert world.state is RunState.DONE
            for account in world.run.accounts():
                assert account.is_balanced
                assert not account.in_flight_count + account.waiting_count + account.fresh_count
            for policy in world.policies:
                assert world.account(policy).trained_count <= len(self.consumed[policy])
            assert all(run.state.is_final for run in world.evals.values())

        def do(self, member, task_id):
            task, left = self.nodes[member][task_id]
            if not self.world.live(member):
                return
            self.world.goes_on = self.sends_lots
            for index in sorted(left):
                reward = float(index % 2) if self.composition else 1.0
                versions = self.versions(member, task)
                self.world.send(member, task, index, versions=versions, reward=reward)
            self.nodes[member].pop(task_id, None)
            self.world.goes_on = False
            self.world.finish(member, task)

        def replay(self):
            run = Run(
                self.world.settings,
                start_time=self.world.run.status(self.world.clock.now()).start_time,
            )
            for number, (event, now, goes_on) in enumerate(self.events):
                read = read_record(record_bytes(event, now, goes_on=goes_on))
                again = run.apply(read.entry, read.time, goes_on=read.goes_on)
                assert list(map(kinds, again.effects)) == list(map(kinds, self.effects[number]))
                assert again.digest == self.digests[number]
                if number + 1 in self.looks:
                    assert picture_of(run) == self.looks[number + 1]
                if number == len(self.events) // 2:
                    run, _ = load_state(dump_state(run, position=0, modules=OURS), modules=OURS)
            assert run.accounts() == self.world.run.accounts()
            assert picture_of(run) == picture_of(self.world.run)

    return Laws


def refusal_by(run, event):
    """What a hub would say instead of applying an event; None: it applies it."""
    if isinstance(event, ev.RolloutArrived):
        with suppress(AstraflowError):
            return run.refusal(event)
    return None


def repeats_of(run):
    return Counter({account.policy_id: account.duplicate_count for account in run.accounts()})


def kinds(effect):
    """What of an effect can be compared: arrays have no truth."""
    if isinstance(effect, ef.SendBatch):
        return (effect.member_id, effect.rank, effect.header)
    if isinstance(effect, ef.RecordRollout):
        return (effect.member_id, effect.rollout.rollout_id)
    return effect


def hold(laws, *, max_examples):
    run_state_machine_as_test(
        laws,
        settings=settings(
            max_examples=max_examples,
            derandomize=True,
            stateful_step_count=40,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_laws_hold_whatever_members_do(laws):
    hold(laws, max_examples=4)


@pytest.mark.long
def test_laws_hold_however_often_members_do_whatever(laws):
    hold(laws, max_examples=30)


@dataclass(slots=True, kw_only=True)
class Alternate(PromptSelector):
    """An algorithm of others, whose state has to be in snapshots as well."""

    seen: dict[str, list[int]] = field(default_factory=dict, init=False)

    def admits(self, prompt, dice):
        turns = self.seen.setdefault(prompt.prompt_id, [])
        turns.append(dice.count)
        return len(turns) % 2 == 1


def specs(**options):
    made = [PlugInSpec(name=name, options=each) for name, each in options.items()]
    return st.lists(st.sampled_from(made), max_size=2, unique_by=lambda spec: spec.name).map(tuple)


ORDERS = [PlugInSpec(name=name) for name in ("latest", "uniform", "prioritised")]
EQUAL = MixPhaseSettings(weights={"train": 1, "other": 2})
LATER = MixPhaseSettings(weights={"train": 2, "third": 1}, from_version=2)
COMPOSITIONS = st.fixed_dictionaries(
    {
        "selectors": specs(
            **{f"{__name__}:Alternate": {}},
            uniform={},
            greso={"min_submit_hard": 0.3},
            filter_solved={"threshold": 0.6, "decay": 0.5},
            curriculum={"width": 0.4},
        ),
        "filters": specs(
            zero_advantage={},
            reward_range={"low": 0.1, "high": 0.9},
            length={"max_tokens": 2},
            truncated={},
            route={"policies": {"solver": [{"data_sets": ["train"]}, {"from_s": 3}]}},
        ),
        "max_skips": st.sampled_from([1, 3, 256]),
        "mix": st.sampled_from(
            [(MixPhaseSettings(weights={"train": 1}),), (EQUAL,), (EQUAL, LATER)]
        ),
        "row_count": st.sampled_from([3, 30]),
        "serving": st.fixed_dictionaries(
            {
                "buffer": st.builds(
                    BufferSettings,
                    order=st.sampled_from(BufferOrder),
                    max_groups=st.sampled_from([None, 2, 3]),
                    max_nbytes=st.sampled_from([None, 150]),
                ),
                "replay": st.builds(
                    ReplaySettings,
                    ratio=st.sampled_from([0.0, 0.5, 0.9]),
                    order=st.sampled_from(ORDERS),
                    max_uses=st.sampled_from([2, 3]),
                    max_staleness=st.integers(0, 2),
                    max_groups=st.sampled_from([1, 8]),
                ),
                "guards": specs(distinct_prompts={}, useful_share={"min_share": 1.0}),
                "max_refusals": st.integers(0, 2),
            }
        ),
    }
)


def composed(composition, max_staleness):
    """Return settings of a world; what is replayed keeps to the law of the run."""
    if not composition:
        return {}
    serving = dict(composition["serving"])
    bound = min(max_staleness, serving["replay"].max_staleness)
    serving["replay"] = replace(serving["replay"], max_staleness=bound)
    return composition | {"serving": serving}


def check_compositions(laws, count):
    class Composed(laws):
        compositions = COMPOSITIONS

    hold(Composed, max_examples=count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.long)])
def test_laws_hold_whatever_algorithms_are_composed(laws, count):
    check_compositions(laws, count)
