"""The messages of the rendezvous, each a line of JSON of bounded length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field, StrictInt

from tfdist.errors import ClusterError, DisagreementError

LONGEST_MESSAGE_BYTES = 1 << 16
# An answer has at most a few values of each setting.
LONGEST_ANSWER_BYTES = 16 * LONGEST_MESSAGE_BYTES
# The chief answers by the earliest deadline of all; its answer may travel this long.
SECONDS_TO_HEAR_ALL = 5.0

# A setting that is always compared.
CLUSTER = "TF_CONFIG cluster"
# A longer cluster is compared by its hash, since a hello must stay short for any number of processes.
LONGEST_CLUSTER_BYTES = 1000


class Hello(BaseModel):
    """The first message of a rank: its number, its settings, and how long it can still wait."""

    tfdist: Literal[1]
    rank: StrictInt = Field(gt=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)  # until its deadline
    deadline_seconds: float = Field(gt=0, allow_inf_nan=False)
    world_size: StrictInt  # of its cluster
    cluster: str  # as `described_cluster` has it
    settings: dict[str, str]


class Refusal(BaseModel):
    """The reason why a job cannot begin; every rank raises it."""

    differing: bool
    sentence: str
    hint: str

    def error(self) -> ClusterError:
        return (DisagreementError if self.differing else ClusterError)(self.sentence, self.hint)


class Answer(BaseModel):
    """The chief's message to all ranks at the end."""

    tfdist: Literal[1]
    refusal: Refusal | None


def as_line(message: BaseModel) -> bytes:
    """The message as it travels."""
    return message.model_dump_json().encode() + b"\n"


def described_cluster(cluster: Mapping[str, Sequence[str]]) -> str:
    """A cluster in a text of bounded length, which is the same for equal clusters alone."""
    text = json.dumps(cluster)
    if len(text) <= LONGEST_CLUSTER_BYTES:
        return text
    addresses = [address for of_role in cluster.values() for address in of_role]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{len(addresses)} processes from {addresses[0]} to {addresses[-1]}, SHA-256 {digest}"
