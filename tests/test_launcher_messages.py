"""What the launcher shows of its processes' messages: no noise of TensorFlow's, and failures whole."""

import subprocess
import sys

import pytest

from tfdist.launcher import process

NOISE = [
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"I0000 00:00:1795418134.282634    2387 port.cc:153] oneDNN custom operations are on.",
    b"To enable the following instructions: AVX2 AVX512F, in other operations, rebuild TensorFlow.",
    b"I0000 00:00:1795418197.165421    4247 coordination_service.cc:505] Example stragglers:\r",
    b"/job:worker/replica:0/task:1\r",
]
SAID = [
    b"Epoch 1/2",
    b"I think so",
    b"W is a letter",
    b"\r 3/9 \x1b[0m loss: 0.5\r 9/9",
    b"",
    b"INFO is kept",
    b"/home/me",
]


def whole(noise_filter, parts):
    return b"".join([*(noise_filter.filter(part) for part in parts), noise_filter.end()])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_noise_is_left_out_and_all_else_is_shown_however_it_comes(size):
    lines = [line for pair in zip(SAID, [*NOISE, NOISE[0], NOISE[1]], strict=True) for line in pair]
    text = b"\n".join([*lines, b"the end"])
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
    assert whole(process.NoiseFilter(), parts) == b"\n".join([*SAID, b"the end"])


def test_a_prompt_and_a_progress_bar_are_shown_at_once():
    noise_filter = process.NoiseFilter()
    for part in (b"Is it so? ", b"In what way? ", b"\r 1/9", b"\r 2/9", b"\n", b"Tell me: "):
        assert noise_filter.filter(part) == part


def traceback(depth, error):
    return ["Traceback (most recent call last):", *(f'  File "a.py", line {n}' for n in range(depth)), error]


@pytest.mark.parametrize(
    ("lines", "begins"),
    [
        ([*["Epoch"] * 50, *traceback(60, "ValueError: no")], 50),
        ([*traceback(3, "KeyError: 1"), *["Epoch"] * 50, *traceback(60, "ValueError: no")], 55),
        (
            [
                "Epoch",
                *traceback(40, "KeyError: 1"),
                "During handling of the above exception, another exception occurred:",
                *traceback(40, "ValueError: no"),
            ],
            1,
        ),
        ([*["Epoch"] * 9, *traceback(60, "ValueError: no"), "error: unexpected ValueError; the log is r/log.txt"], 9),
        (["Epoch"] * 50, 30),
        ([*["Epoch"] * 50, "error: Gone", "hint: see"], 32),
    ],
)
def test_a_failure_is_shown_from_its_beginning_and_at_least_the_last_lines(lines, begins):
    assert process.failure(lines) == "\n".join(lines[begins:])


def test_no_noise_is_among_the_last_lines():
    assert process.failure(["said", *(line.decode() for line in NOISE)]) == "said"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (["nothing.py"], "error: There is no program `nothing.py` in `"),
        (["-m", "nothing.at_all"], "error: There is no module `nothing.at_all`"),
    ],
)
def test_a_program_that_is_not_there_is_a_sentence(program, sentence, tmp_path):
    command = [sys.executable, "-m", "tfdist", "launch", "--workers", "2", *program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr and "hint: correct the" in done.stderr and "Traceback" not in done.stderr
