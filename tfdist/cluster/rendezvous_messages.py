"""The messages of the rendezvous, each a line of JSON of bounded length."""

from __future__ import annotations

import contextlib
from typing import Literal

from pydantic import BaseModel, Field, StrictInt, TypeAdapter, ValidationError

from tfdist.errors import ClusterError, DisagreementError

LONGEST_MESSAGE_BYTES = 1 << 16
# The chief answers by the earliest deadline of all; its answer may travel this long.
SECONDS_TO_HEAR_ALL = 5.0

# A setting that is always compared.
CLUSTER = "TF_CONFIG cluster"


class Hello(BaseModel):
    """The first message of a rank: its number, its settings, and how long it can still wait."""

    tfdist: Literal[1]
    rank: StrictInt = Field(gt=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)  # until its deadline
    deadline_seconds: float = Field(gt=0, allow_inf_nan=False)
    settings: dict[str, str]

    @property
    def world_size(self) -> int:
        """The number of processes in the cluster of this rank's settings; 0 if these name none."""
        with contextlib.suppress(ValidationError):
            cluster = TypeAdapter(dict[str, list[str]]).validate_json(self.settings.get(CLUSTER, ""))
            return sum(map(len, cluster.values()))
        return 0


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
