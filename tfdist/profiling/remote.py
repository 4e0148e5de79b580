"""Traces of other processes that run a TensorFlow server, which records a trace on request.

The request uses the server's existing port, and the trace is sent back, so the processes need no shared disk.

Source: `tsl/profiler/protobuf/profiler_service.proto` and `profiler_options.proto`; TensorFlow has no Python module
for the former.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A server stops by itself after this time.
LONGEST_MILLISECONDS = 600_000
# The server does not confirm that a trace has begun, and a few steps may take no longer than connecting.
SECONDS_TO_START = 2.0
SECONDS_TO_STOP = 5.0
SECONDS_TO_SEND = 30.0  # for all traces together

_SERVICE = "/tensorflow.ProfilerService"
# The options of `tf.profiler.experimental.start`.
_OPTIONS = {
    "version": 1,
    "include_dataset_ops": True,
    "host_tracer_level": 2,
    "device_tracer_level": 1,
    "duration_ms": LONGEST_MILLISECONDS,
}
# The messages with the number and type of each field that is used here.
_MESSAGES = {
    "ProfileRequest": {
        "duration_ms": (1, "UINT64"),
        "opts": (4, "BYTES"),  # a ProfileOptions
        "session_id": (6, "STRING"),
        "emit_xspace": (9, "BOOL"),
    },
    "ProfileOptions": {
        "include_dataset_ops": (1, "BOOL"),
        "host_tracer_level": (2, "UINT32"),
        "device_tracer_level": (3, "UINT32"),
        "version": (5, "UINT32"),
        "duration_ms": (9, "UINT64"),
    },
    "ProfileResponse": {"xspace": (8, "BYTES")},  # a message that is not parsed here
    "TerminateRequest": {"session_id": (1, "STRING")},
    "TerminateResponse": {},
}


class RemoteTraces:
    """Starts traces of the processes at `addresses`, such as `{"worker-0": "10.0.0.2:2222"}`."""

    def __init__(self, addresses: Mapping[str, str]):
        import grpc

        self._session = uuid.uuid4().hex
        unlimited = [("grpc.max_receive_message_length", -1)]
        self._channels = {name: grpc.insecure_channel(place, options=unlimited) for name, place in addresses.items()}
        request = {
            "duration_ms": LONGEST_MILLISECONDS,
            "opts": _message("ProfileOptions")(**_OPTIONS).SerializeToString(),
            "session_id": self._session,
            "emit_xspace": True,
        }
        self._answers = {name: _method(channel, "Profile").future(request) for name, channel in self._channels.items()}
        time.sleep(SECONDS_TO_START)

    def stop(self, folder: str | os.PathLike[str]) -> None:
        """Ends the traces and writes them as `folder/<name>.xplane.pb`; warns if a process sends none."""
        import grpc

        Path(folder).mkdir(parents=True, exist_ok=True)
        stopping = [
            _method(channel, "Terminate").future({"session_id": self._session}, timeout=SECONDS_TO_STOP)
            for channel in self._channels.values()
        ]
        for stopped in stopping:
            stopped.exception()  # waits; an error here shows below too, since there is no trace then
        deadline = time.monotonic() + SECONDS_TO_SEND
        for name, answer in self._answers.items():
            try:
                trace = answer.result(max(0.0, deadline - time.monotonic())).xspace
                Path(folder, f"{name}.xplane.pb").write_bytes(trace)
            except (grpc.RpcError, grpc.FutureTimeoutError) as error:
                warnings.warn(f"No trace of {name}: {_reason(error)}", stacklevel=2)
        for channel in self._channels.values():
            channel.close()


def _reason(error: Exception) -> str:
    return str(error.details()) if hasattr(error, "details") else f"it sent none within {SECONDS_TO_SEND:g} s"


def _method(channel: Any, name: str) -> Any:
    request, response = _message(f"{name}Request"), _message(f"{name}Response")
    return channel.unary_unary(
        f"{_SERVICE}/{name}",
        request_serializer=lambda fields: request(**fields).SerializeToString(),
        response_deserializer=response.FromString,
    )


@functools.cache
def _message(name: str) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    proto = descriptor_pb2.FieldDescriptorProto
    fields = [
        proto(name=field, number=number, type=getattr(proto, f"TYPE_{kind}"), label=proto.LABEL_OPTIONAL)
        for field, (number, kind) in _MESSAGES[name].items()
    ]
    file = descriptor_pb2.FileDescriptorProto(
        name=f"tfdist/{name}.proto",
        package="tfdist",
        syntax="proto3",
        message_type=[descriptor_pb2.DescriptorProto(name=name, field=fields)],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tfdist.{name}"))
