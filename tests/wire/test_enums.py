from enum import StrEnum

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire import (
    common,
    control,
    dataflow,
    fields,
    rollout,
    tasks,
    versions,
    weights,
)
from astraflow.wire.fields import EnumTable
from astraflow_proto.common.v1 import member_pb2, session_pb2
from astraflow_proto.rollout.v1 import trajectory_pb2

# No type of ours: a view is for one call.
WITHOUT_TABLE = {"RolloutView"}
WIRE = (
    *(common, control, dataflow, fields),
    *(rollout, tasks, versions, weights),
)


class Role(StrEnum):
    TRAINER = "trainer"
    RAAS = "raas"


class TestTable:
    def test_goes_by_names(self):
        table = EnumTable(Role, member_pb2.Role, "ROLE")

        assert table.encode(Role.RAAS) == member_pb2.ROLE_RAAS
        assert table.decode(member_pb2.ROLE_TRAINER) is Role.TRAINER

    @pytest.mark.parametrize("number", [0, 99, -1])
    def test_refuses_unspecified_and_unknown_numbers(self, number):
        with pytest.raises(AstraflowError, match="is no role") as caught:
            EnumTable(Role, member_pb2.Role, "ROLE").decode(number)

        assert caught.value.reason is Reason.INVALID_FIELD
        assert caught.value.metadata == {"field": "role"}

    def test_unspecified_can_have_a_meaning(self):
        assert rollout.KV_POLICIES.decode(trajectory_pb2.KV_POLICY_UNSPECIFIED).value == "unknown"

    def test_is_not_made_when_the_wire_lacks_a_member(self):
        role = StrEnum("Role", ["TRAINER", "RAAS", "JUDGE"])

        with pytest.raises(KeyError, match="ROLE_JUDGE"):
            EnumTable(role, member_pb2.Role, "ROLE")

    def test_is_not_made_when_core_lacks_a_number(self):
        role = StrEnum("Role", ["TRAINER"])

        with pytest.raises(KeyError, match=r"lacks numbers \[2\]"):
            EnumTable(role, member_pb2.Role, "ROLE")


def test_every_enum_of_the_contract_has_a_table():
    covered = {frozenset(table.numbers.values()) | {0} for table in fields.TABLES.values()}

    missing = {
        name
        for name, numbers in contract_enums().items()
        if name not in WITHOUT_TABLE and numbers not in covered
    }

    assert not missing


def test_an_unknown_capability_is_ignored():
    peer = session_pb2.Contract(contract_version=1, capabilities=[1, 999])

    assert {each.value for each in common.decode_contract(peer).capabilities} == {"relay"}


def contract_enums() -> dict[str, frozenset[int]]:
    """Return the numbers of every enum by its name."""
    modules = [each for module in WIRE for each in vars(module).values()]
    files = [each.DESCRIPTOR for each in modules if getattr(each, "__name__", "").endswith("_pb2")]
    return {
        enum.name: frozenset(EnumTypeWrapper(enum).values())
        for file in files
        for enum in file.enum_types_by_name.values()
    }
