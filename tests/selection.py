"""Which tests a command runs: `make test` the quick ones, CI one seventh of the thorough ones too, `make test-all` all.

`thorough` is what other tests show in part; `sampled(n)` makes all but n cases of a test thorough. The seventh follows
from the commit, so that a commit can be tested again as it was.
"""

import pytest

SEVENTHS = 7


def mark_samples(items):
    """Marks as thorough all but `n` cases of each test that is `sampled(n)`, which are spread over its cases."""
    tests = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        (count,) = cases[0].get_closest_marker("sampled").args
        chosen = {number * len(cases) // count for number in range(count)}
        for number, item in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.thorough)


def in_seventh(items, commit):
    """Of `items` the thorough ones that belong to the seventh of the commit with the hexadecimal number `commit`.

    The cases of a test go to all sevenths. Tests of one file that start processes stay together, since they share jobs,
    unless they are marked `independent`.
    """
    seventh = int(commit, 16) % SEVENTHS
    thorough = [i for i in items if i.get_closest_marker("thorough") and not i.get_closest_marker("exhaustive")]
    sharing = [i for i in thorough if i.get_closest_marker("processes") and not i.get_closest_marker("independent")]
    files = sorted({item.path for item in sharing})
    apart = [item for item in thorough if item not in sharing]
    chosen_files = files[seventh::SEVENTHS]
    return apart[seventh::SEVENTHS] + [item for item in sharing if item.path in chosen_files]
