"""One origin behind one shaped uplink, and receivers in one region: processes, at two ends.

Every receiver is told of a version at the same instant, with the sources that the hub's own
ranking lists for it. Measured: what crossed the uplink, in patches; when the first and the last
receiver hold the version; the same with no relays; and what it costs when the relay that feeds
all others is killed in the middle, or stopped: its connections stay open, and nothing comes.
Needs root.

    python benchmarks/fanout.py --rounds 5 --json fanout.json
"""

import argparse
import base64
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from astraflow.core.ids import MemberId
from astraflow.core.members import MemberRole, Resources, ServedPolicy
from astraflow.core.pool.live_members import LiveRaas, LiveTrainer
from astraflow.core.pool.sessions import Sessions
from astraflow.core.pool.sources import version_with_sources
from astraflow.core.versions import VersionInfo, WeightEndpoint
from astraflow.wire.versions import decode_version_info, encode_version_info
from astraflow_proto.weights.v1 import version_pb2
from fanout_ends.origin import POLICY
from link import PROFILES, End, Link
from link.needs import exit_without_link

BARS: Final = {
    "egress_patches": 1.15,
    "last_over_first": 1.4,
    "kill_cost_s": 2.0,
    "stop_cost_s": 2.0,
}

Row = dict[str, Any]


class Region:
    """Receivers and what the hub knows of them."""

    def __init__(self, origin: str, endpoints: list[str]) -> None:
        self.sessions = Sessions(ttl=timedelta(seconds=10))
        self.sessions.open(
            LiveTrainer(
                **_common("trainer", MemberRole.TRAINER),
                policy_id=POLICY,
                weight_endpoints=(WeightEndpoint(rank=0, endpoint=origin),),
            )
        )
        served = ServedPolicy(policy_id=POLICY, max_context_token_count=1)
        self.members = [
            LiveRaas(
                **_common(f"raas-{number}", MemberRole.RAAS),
                policies={POLICY: served},
                relay_endpoint=endpoint,
            )
            for number, endpoint in enumerate(endpoints)
        ]
        for member in self.members:
            self.sessions.open(member)

    def told(self, info: VersionInfo, member: LiveRaas, *, relays: bool) -> str:
        """Return the event that one receiver gets, as a line."""
        seen = version_with_sources(self.sessions, info, member.member_id if relays else None)
        if not relays:
            seen = replace(seen, sources=seen.sources[-1:])
        message = encode_version_info(seen).SerializeToString()
        return json.dumps({"info": base64.b64encode(message).decode()})


class Fan:
    """One origin and its receivers."""

    def __init__(self, link: Link, origin: End, receivers: list[End]) -> None:
        self._link = link
        self._origin = origin
        self._receivers = receivers
        place = origin.hear()["endpoint"]
        self._region = Region(place, [each.hear()["endpoint"] for each in receivers])
        self._alive = list(range(len(receivers)))

    def round(self, *, relays: bool = True, fault: str | None = None, after_s: float = 0.0) -> Row:
        """Publish a version; return what it took until all hold it.

        Args:
            relays: Tell of them.
            fault: kill or pause: of the relay that feeds all others, which is not seen again.
            after_s: When, from the event on.
        """
        # The first receiver is sent chunks while they are encoded.
        before = self._link.count()
        self._origin.tell("publish")
        answer = self._origin.hear()
        info = decode_version_info(
            version_pb2.VersionInfo.FromString(base64.b64decode(answer["info"]))
        )
        lines = {
            number: self._region.told(info, self._region.members[number], relays=relays)
            for number in self._alive
        }
        started = time.monotonic()
        for number, line in lines.items():
            self._receivers[number].tell(line)
        first = self._alive[0]
        if fault is not None:
            time.sleep(after_s)
            self._alive.remove(first)
            getattr(self._receivers[first], fault)()
        told = [self._receivers[number].hear() for number in self._alive]
        for number in self._alive:
            self._region.members[number].live[POLICY] = info.version
        crossed = self._link.count().since(before).to_far.nbytes
        if fault is not None:
            # Its session ends, by its TTL.
            self._receivers[first].kill()
            self._region.sessions.close(self._region.members[first].member_id)
        seconds = [each["done"] - started for each in told]
        cpu_s = [each["cpu_s"] for each in told]
        return _row(answer["patch_nbytes"], crossed, seconds, cpu_s)


def _row(patch_nbytes: int, crossed: int, seconds: list[float], cpu_s: list[float]) -> Row:
    return {
        "patch_nbytes": patch_nbytes,
        "egress_patches": round(crossed / patch_nbytes, 3),
        "first_s": round(min(seconds), 3),
        "last_s": round(max(seconds), 3),
        "last_over_first": round(max(seconds) / min(seconds), 3),
        "cpu_s": round(statistics.median(cpu_s), 4),
        "all_cpu_s": round(sum(cpu_s), 3),
    }


def _common(name: str, role: MemberRole) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "member_id": MemberId(name),
        "name": name,
        "role": role,
        "incarnation": 1,
        "region": "far" if role is MemberRole.RAAS else "near",
        "resources": Resources(),
        "join_time": now,
        "keep_alive_time": now,
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    profile = PROFILES[given.profile]
    with ExitStack() as stack:
        link = stack.enter_context(Link(profile, tuned=True))
        ends = (link.near.address, str(given.elements), str(given.share))
        origin = stack.enter_context(End(link.near, "fanout_ends.origin", *ends))
        receivers = [
            stack.enter_context(End(link.far, "fanout_ends.receiver"))
            for _ in range(given.receivers)
        ]
        fan = Fan(link, origin, receivers)
        cold = fan.round()
        fan.round()
        relayed = [fan.round() for _ in range(given.rounds)]
        faults = [
            [fan.round(fault=kind, after_s=given.fault_after) for kind in ("pause", "kill")]
            for _ in range(given.faults)
        ]
        direct = [fan.round(relays=False) for _ in range(max(1, given.rounds // 2))]
    usual = statistics.median(row["last_s"] for row in relayed)
    return {
        "profile": given.profile,
        "receivers": given.receivers,
        "ideal_s": round(profile.ideal_s(relayed[0]["patch_nbytes"]), 3),
        "bars": BARS,
        "cold": cold,
        "relayed": relayed,
        "direct": direct,
        "killed": [
            killed | {"kill_cost_s": round(killed["last_s"] - usual, 3)} for _, killed in faults
        ],
        "stopped": [
            stopped | {"stop_cost_s": round(stopped["last_s"] - usual, 3)} for stopped, _ in faults
        ],
    }


def main() -> None:
    given = _arguments()
    exit_without_link()
    result = measure(given)
    for name in ("cold", "relayed", "direct", "killed", "stopped"):
        rows = result[name] if isinstance(result[name], list) else [result[name]]
        for row in rows:
            print(f"{name:8}", " ".join(f"{key} {value}" for key, value in row.items()))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--profile", choices=PROFILES, default="100mbit-100ms")
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--elements", type=int, default=32 << 20)
    parser.add_argument("--share", type=float, default=0.02, help="of the elements that change")
    parser.add_argument("--faults", type=int, default=2, help="relays that die, and that stop")
    parser.add_argument("--fault-after", type=float, default=0.1, help="seconds after the event")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.receivers <= 2 * given.faults:
        parser.error(
            f"{given.faults} relays that die and as many that stop leave none of "
            f"{given.receivers} receivers; give fewer --faults"
        )
    return given


if __name__ == "__main__":
    main()
