import pytest

from astraflow.core import events as ev
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Capability, Contract, ModelIdentity, ServedPolicy
from astraflow.core.tasks import RegisteredCode


@pytest.fixture
def world(make_world):
    return make_world()


def refused(call, *arguments, **more):
    with pytest.raises(AstraflowError) as caught:
        call(*arguments, **more)
    return caught.value.reason


def served(policy="solver", digest=b""):
    identity = ModelIdentity(name="m", config_digest=digest)
    return (ServedPolicy(policy_id=policy, identity=identity, max_context_token_count=9),)


def test_members_get_ids_of_the_run(world):
    assert world.join("a") == "raas-r-0"
    assert world.join("b") == "raas-r-1"
    assert world.register() == "trainer-r-0"


def test_names_are_unique_in_the_pool(world):
    node = world.join("a")
    assert refused(world.join, "a") is Reason.NAME_TAKEN
    assert world.join("a", resumes=node) == node


def test_policy_has_one_trainer(world):
    trainer = world.register()
    assert refused(world.register) is Reason.POLICY_TAKEN
    world.leave(trainer)
    assert world.register() != trainer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policies": served("judge")}, Reason.POLICY_UNKNOWN),
        ({"codes": ()}, Reason.CODE_UNKNOWN),
        ({"contract": Contract(contract_version=0)}, Reason.CONTRACT_UNSUPPORTED),
    ],
)
def test_raas_that_does_not_fit_is_refused(world, changes, reason):
    assert refused(world.join, **changes) is reason
    assert not world.run.status(world.clock.now()).members


def test_raas_that_contradicts_itself_is_refused_before_anything_changes(world):
    both = served(digest=b"one") + served(digest=b"two")
    assert refused(world.join, "a", policies=both) is Reason.MODEL_MISMATCH
    assert not world.run.status(world.clock.now()).members
    assert world.join("a", policies=served(digest=b"two")) == "raas-r-0"


def test_members_tell_and_replay_experts_where_a_policy_needs_it(make_world):
    world = make_world(serving={"needs_routes": True})
    assert refused(world.join) is Reason.CONTRACT_UNSUPPORTED
    assert refused(world.register) is Reason.CONTRACT_UNSUPPORTED
    contract = Contract(capabilities=frozenset({Capability.ROUTED_EXPERTS}))
    assert world.join(contract=contract)
    assert world.register(contract=contract)


def test_batches_have_one_size(world):
    assert refused(world.register, groups_per_batch=7) is Reason.INVALID_FIELD


def test_all_members_have_the_same_model(world):
    world.register(identity=ModelIdentity(name="m", config_digest=b"one"))
    assert refused(world.join, policies=served(digest=b"two")) is Reason.MODEL_MISMATCH
    assert world.join(policies=served(digest=b"one"))


def test_code_without_a_digest_is_not_compared(world):
    assert world.join(codes=(RegisteredCode(name="toy", code_digest=b"any"),))


def test_registration_says_what_to_publish_next(world):
    trainer = world.register()
    world.publish(trainer)
    world.leave(trainer)
    world.register()
    assert world.publish("trainer-r-1") == 2


def test_node_that_comes_back_goes_on_with_what_it_holds(world):
    _, node = world.started(credit=4)
    kept, lost = (task.task_id for task in world.tasks[node])
    world.join("node", credit=4, resumes=node, held=(kept,))
    # What it does not know of is sent again; nothing is issued twice.
    assert [task.task_id for task in world.tasks[node]] == [lost]
    assert world.account().reissued_count == 0


def test_node_that_comes_back_hears_again_of_what_was_withdrawn_meanwhile(world):
    _, node = world.started(credit=4)
    kept, lost = (task.task_id for task in world.tasks[node])
    while len(world.cancelled) < 2:  # its deadlines pass
        world.tick(5)
        world.keep_alive(node)
    world.join("node", credit=4, resumes=node, held=(kept,))
    assert [each.task_id for each in world.cancelled] == [kept, lost, kept]
    # Nobody has the other one: it takes no more of the credit, which two new samples get.
    (task,) = world.tasks[node]
    assert (task.attempt, len(task.sample_indexes)) == (1, 2)


def test_what_was_withdrawn_before_a_node_knew_of_it_takes_none_of_its_credit(make_world, suite):
    world = make_world(groups_per_batch=1, suites=(suite(at_start=False, at_end=False),))
    _, node = world.started(credit=4)
    world.work(node)
    created = ev.EvalCreated(request_id="q", suite="main", pool_share=1.0)
    cancelled = ev.EvalCancelled(eval_run_id=world.apply(created).eval_run_id)
    assert world.tasks[node]
    world.apply(cancelled)
    world.join("node", credit=4, resumes=node)
    [member] = world.run.status(world.clock.now()).members[1:]
    assert not world.tasks.get(node)
    assert member.outstanding_count == 0


def test_restarted_node_starts_with_nothing(world):
    _, node = world.started(credit=4)
    world.join("node", credit=4, resumes=node, incarnation=2)
    assert [close.is_fenced for close in world.closed] == [True]
    assert not world.tasks.get(node)
    world.report(node, 0)
    assert [task.attempt for task in world.tasks[node]] == [1, 1]
    assert refused(world.join, "node", resumes=node, incarnation=1) is Reason.SESSION_FENCED


def test_node_whose_session_ended_keeps_its_name_tag(world):
    node = world.join("a")
    world.tick(11)
    assert world.closed[-1].is_lost
    assert world.join("a", resumes=node) == node


def test_trainer_that_comes_back_keeps_its_batches(world):
    trainer, node = world.started()
    world.work(node, 2)
    header, _ = world.pop_batch(trainer)
    world.register(resumes=trainer, held=(header.batch_id,))
    world.open_stream(trainer)
    again, _ = world.pop_batch(trainer)
    assert (again.batch_id, again.delivery_count) == (header.batch_id, 2)


def test_trainer_whose_session_ended_gets_its_batch_back(world):
    trainer, node = world.started()
    world.work(node, 2)
    header, _ = world.pop_batch(trainer)
    world.leave(trainer)
    world.register(resumes=trainer, held=(header.batch_id,))
    assert world.account().leased_count == 4
    assert world.ack(trainer, header.batch_id)


def test_new_process_starts_counting_where_its_state_is(world):
    trainer, node = world.started()
    world.work(node)
    world.train(trainer)
    world.leave(trainer)
    successor = world.register()
    world.publish(successor, step=0)
    world.open_stream(successor)
    # The weights of version 2 have no step behind them: the next batch trains on version 2.
    assert world.policy().step == 0
    world.report(node, 2)
    world.work(node)
    assert world.batches[successor, 0][0][0].metrics["lag/max"] <= 1


def test_version_tells_where_it_is_served(world):
    trainer = world.register()
    world.publish(trainer)
    (source,) = world.run.sources("solver", 0)
    assert (source.kind, source.endpoint, source.member_id) == ("origin", "solver:1", trainer)
    assert world.announced[-1].sources == (source,)
    relay = world.join("relay", relay_endpoint="relay:1")
    world.report(relay, 0)
    assert [s.endpoint for s in world.run.sources("solver", 0)] == ["relay:1", "solver:1"]
