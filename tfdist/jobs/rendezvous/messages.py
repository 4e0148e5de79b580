"""The messages of the rendezvous, each a line of bounded length."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field, StrictInt

from tfdist.jobs.connections import LONGEST_LINE_BYTES, SentError

# An answer contains at most a few values of each setting.
LONGEST_ANSWER_BYTES = 16 * LONGEST_LINE_BYTES
# The chief answers by the earliest deadline of all processes; its answer may travel for this long.
SECONDS_TO_RECEIVE_ANSWER = 5.0

# The name of a setting that is always compared.
CLUSTER = "TF_CONFIG cluster"
# A longer cluster is compared by its hash, since a hello must stay short for any number of processes.
LONGEST_CLUSTER_BYTES = 1000


class Hello(BaseModel):
    """The first message of a rank: its number, its settings, and how long it will still wait."""

    tfdist: Literal[1]
    rank: StrictInt = Field(gt=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)  # until its deadline
    deadline_seconds: float = Field(gt=0, allow_inf_nan=False)  # as its user has set it
    world_size: StrictInt  # the number of processes in its cluster
    cluster: str  # see `described_cluster`
    settings: dict[str, str]


class Answer(BaseModel):
    """The chief's message to all ranks at the end: the reason why the job cannot begin, or `None`."""

    tfdist: Literal[1]
    refusal: SentError | None


def as_line(message: BaseModel) -> bytes:
    """The message as it is sent."""
    return message.model_dump_json().encode() + b"\n"


def packed(messages: Iterable[bytes]) -> bytes:
    """The messages of several processes as one line."""
    return b" ".join(map(base64.b64encode, messages)) + b"\n"


def unpacked(line: bytes) -> list[bytes]:
    """The messages of a line."""
    return [base64.b64decode(part) for part in line.split(b" ")]


def described_cluster(cluster: Mapping[str, Sequence[str]]) -> str:
    """Describes a cluster in a text of bounded length, which is equal only for equal clusters."""
    text = json.dumps(cluster)
    if len(text) <= LONGEST_CLUSTER_BYTES:
        return text
    addresses = [address for role_addresses in cluster.values() for address in role_addresses]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{len(addresses)} processes from {addresses[0]} to {addresses[-1]}, SHA-256 {digest}"
