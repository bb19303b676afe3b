"""Enums: one table per enum, complete by construction, so a new member cannot be forgotten."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Generic, TypeVar

from astraflow.core.errors import AstraflowError, Reason

Member = TypeVar("Member", bound=StrEnum)


class EnumTable(Generic[Member]):
    """Maps the members of a core enum to the numbers of a wire enum by their names.

    `Dtype.BF16` goes with `DTYPE_BF16` for the prefix `DTYPE`.
    """

    def __init__(
        self, core: type[Member], wire: Any, prefix: str, *, unspecified: Member | None = None
    ) -> None:
        """Make the table.

        Args:
            core: The core enum.
            wire: The generated enum.
            prefix: Of the wire's names.
            unspecified: What number 0 means, where it means something.

        Raises:
            KeyError: When one side has a name that the other lacks.
        """
        values: Mapping[str, int] = dict(wire.items())
        self._what = prefix.lower()
        self._numbers = {
            member: values[f"{prefix}_{member.name}"]
            for member in core
            if member is not unspecified
        }
        self._members = {number: member for member, number in self._numbers.items()}
        unknown = set(values.values()) - self._members.keys() - {0}
        if unknown:
            raise KeyError(f"{core.__name__} lacks numbers {sorted(unknown)} of {prefix}")
        if unspecified is not None:
            self._numbers[unspecified] = 0
            self._members[0] = unspecified

    @property
    def numbers(self) -> Mapping[Member, int]:
        """The wire's number of each member."""
        return self._numbers

    def encode(self, member: Member) -> Any:
        """Return the wire's number."""
        return self._numbers[member]

    def decode(self, number: int) -> Member:
        """Return the member.

        Raises:
            AstraflowError: INVALID_FIELD for a number that is unspecified or unknown.
        """
        try:
            return self._members[number]
        except KeyError:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{number} is no {self._what}",
                metadata={"field": self._what},
            ) from None
