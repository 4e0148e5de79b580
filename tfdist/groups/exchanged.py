"""What a process has exchanged with the others of its job: how often, for how long, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchanged:
    """The exchanges of one process so far, or of several processes in some time.

    An engine may send more bytes than these, such as headers, or fewer, where two processes share memory.

    Attributes:
        exchanges: the collective operations, and the messages that were sent or received.
        exchange_seconds: their time, waiting for others included; of exchanges at the same time each counts.
        sent_bytes: of the values that were handed over.
        received_bytes: of the values that came back.
    """

    exchanges: int
    exchange_seconds: float
    sent_bytes: int
    received_bytes: int

    def since(self, before: Exchanged) -> Exchanged:
        """What was exchanged after `before`."""
        return Exchanged(
            self.exchanges - before.exchanges,
            self.exchange_seconds - before.exchange_seconds,
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
        )
