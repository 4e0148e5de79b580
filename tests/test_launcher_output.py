"""What the launcher writes to may be full, closed or stopped: nobody waits for it for long, and it is said once."""

import asyncio
import os
import sys
import time

import pytest

from tfdist.launcher import output


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(output, "STUCK_SECONDS", 0.2)
    monkeypatch.setattr(output, "MAX_BUFFERED_BYTES", 1 << 17)


def write(to, parts):
    async def all_of_them():
        for part in parts:
            await to.write(part)

    began = time.monotonic()
    asyncio.run(all_of_them())
    to.end()
    return time.monotonic() - began


def test_all_is_written_in_its_order_and_a_file_is_gone_on_with(tmp_path):
    reasons, parts = [], [b"%d\n" % number for number in range(1000)]
    for mode in ("wb", "wb", "ab"):
        write(output.Output.to_file(tmp_path / "log", mode, reasons.append), parts)
    assert (tmp_path / "log").read_bytes() == 2 * b"".join(parts)
    assert reasons == []


def test_a_full_disk_is_told_once_with_the_reason():
    reasons = []
    write(output.Output(os.open("/dev/full", os.O_WRONLY), reasons.append, close=True), [b"x" * 1000] * 1000)
    assert reasons == ["No space left on device"]


def test_a_pipe_that_nobody_reads_from_keeps_writers_for_a_moment_and_is_told_once():
    reader, writer = os.pipe()
    reasons = []
    assert write(output.Output(writer, reasons.append), [b"x" * 10_000] * 1000) < 2
    assert reasons == ["nothing could be written for 0.2 s"]
    os.close(reader)  # which lets the thread go


def test_what_is_slow_gets_all(monkeypatch):
    """A reader that takes far longer than what may wait, but goes on taking."""
    reader, writer = os.pipe()
    reasons, read = [], []
    part = b"x" * 50_000

    async def both():
        async def take():
            while sum(map(len, read)) < 20 * len(part):
                read.append(await asyncio.to_thread(os.read, reader, 50_000))
                await asyncio.sleep(0.02)

        to = output.Output(writer, reasons.append, close=True)
        taking = asyncio.create_task(take())
        for _ in range(20):
            await to.write(part)
        await asyncio.to_thread(to.end)
        await taking

    asyncio.run(both())
    os.close(reader)
    assert reasons == []


def test_a_screen_whose_output_is_closed_says_so_on_its_errors(tmp_path, monkeypatch):
    with open(tmp_path / "err", "w+") as errors:
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", errors)
        with output.Screen(tmp_path) as screen:
            write(screen.out, [b"one", b"two"])
        assert (tmp_path / "err").read_text().count("can be shown (it is closed); it is kept in") == 1
