"""Reads the text of a device's profile, as `evenkeel profile` writes it, into what a rank tells."""

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from evenkeel_moe.errors import InvalidInput, PeerViolation
from evenkeel_moe.v1 import agent_pb2 as pb
from evenkeel_moe.wire.from_rank import COST_CURVE, REPLICA_COST
from evenkeel_moe.wire.link import CostCurve, ReplicaCost


@dataclass(frozen=True, slots=True)
class ProfileText:
    """The contents of the file of one device."""

    curve: CostCurve
    replica_cost: ReplicaCost | None
    """None in a file of an earlier version."""
    gpu_uuid: Any
    """As it stands in the file."""
    about: Any
    """The layer that was measured, as it stands in the file."""


def parse_profile(text: str) -> ProfileText:
    """Return the profile in a text. What a rank could not send is refused here already.

    Raises:
        InvalidInput: the text holds no curve, or numbers that cannot be.
    """
    try:
        content = json.loads(text)
        told, cost = content["curve"], content.get("replica_cost")
        curve = COST_CURVE.decode(ParseDict(told, pb.CostCurve()))
        by_replicas = None
        if cost is not None:
            by_replicas = REPLICA_COST.decode(ParseDict(cost, pb.ReplicaCost()))
    except PeerViolation as error:
        raise InvalidInput(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, ParseError) as error:
        raise InvalidInput(f"{error!r:.200}") from error
    return ProfileText(curve, by_replicas, content.get("gpu_uuid"), content.get("about"))
