"""The report as a page: what is in it, and what a browser makes of it."""

import functools
import http.client
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import xml.etree.ElementTree

import pytest

from tests import chromium
from tests.test_study import made
from tfdist.errors import UsageError
from tfdist.study import charts, machine_readable, measure, page, results, runs, summary

EVIL = "<img src=x onerror=alert(1)>|`</script><script>alert(2)</script>`:f"


def named(folder, **names):
    """The runs below `folder`, as if they had been made of another model or dataset."""
    for path in folder.rglob(measure.MEASURED):
        path.write_text(json.dumps({**json.loads(path.read_text()), **names}))


def studied(folder, model="cnn"):
    """The runs of a study: five strategies, of which one fails at times, and one does not learn."""
    place = folder / str(len(list(folder.iterdir())))
    for number in range(3):
        for index, (strategy, workers) in enumerate((("single", 1), ("custom", 2), ("custom", 4), ("mirrored", 2))):
            made(place, strategy, workers, number, seconds=1 / (index + 1) + number / 100)
        made(place, "horovod", 2, number, losses=(2.0, 2.0, 2.0))
        made(place, "multiworker", 2, number, error="" if number else "error: a port is taken\nhint: <b>another</b>")
    named(place, model=model)


def comparisons(folder):
    return results.of_runs(runs.load([folder]))


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The page of a study of three models, one of which has a name with markup."""
    folder = tmp_path_factory.mktemp("several")
    for model in ("cnn", "mlp", EVIL):
        studied(folder, model)
    path = folder / "report.html"
    path.write_text(page.html(comparisons(folder)))
    return path


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(tab, several):
    def open_page(**window):
        tab.events.clear()
        tab.open(several.as_uri(), **window)
        tab.wait("document.documentElement?.dataset.drawn")
        return tab

    return open_page


@pytest.mark.thorough
def test_the_page_has_everything_within_and_lets_nothing_else_in(several):
    html = several.read_text()
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", html.partition("<script")[0])
    assert all('href="data:,"' in tag for tag in tags) and not re.search(
        r"""(src|@import|url\()\s*=?['"(]?https?:""", html
    )
    assert "default-src 'none'" in html and len(html) < 2e6


def test_the_page_the_text_and_the_json_say_what_makes_the_figures_doubtful(tmp_path):
    studied(tmp_path)
    named(tmp_path, cores=2, load_before=9.0, cores_of_others=1.5, loop_seconds=[0.001, 0.0015])
    found = comparisons(tmp_path)
    sentences = (
        "Epochs of `mirrored on 2`, `custom on 4` are shorter than 0.5 s",
        "Before 18 of 18 runs, the load of other programs was above the 2 cores: at most 9.0 threads that could run.",
        "During 18 of 18 runs, other programs used more than 10% of the 2 cores: at most 1.5 cores.",
        "up to 50% slower at some times than at others: its clock is throttled, or other programs share its cores.",
        "are too few to decide whether",
    )
    (case,) = json.loads(machine_readable.text(found))["cases"]
    html, markdown = page.html(found), summary.markdown(found)
    assert "What makes these figures doubtful" in html
    for sentence in sentences:
        assert any(sentence in doubt for doubt in case["doubts"]), (sentence, case["doubts"])
        code = re.sub("`([^`]*)`", r"<code>\1</code>", sentence)
        assert code in html and sentence[1:] in markdown


def test_the_json_has_what_the_page_says(tmp_path):
    studied(tmp_path)
    (found,) = comparisons(tmp_path)
    (case,) = json.loads(machine_readable.text([found]))["cases"]
    rows = {row["name"]: row for row in case["rows"]}
    assert case["fastest"] == "mirrored on 2" and case["faster"][0] == "mirrored on 2" and case["base"] == "single"
    assert rows["single"]["times_as_fast"] is None and rows["custom on 2"]["times_as_fast"]["is_difference"]
    assert rows["multiworker on 2"]["failed"] == 1 and rows["single"]["epoch_seconds"] == pytest.approx(1.01)


def test_the_first_screen_has_the_answer_then_come_tables_pictures_and_errors(several):
    html = several.read_text()
    assert (
        "<h1>Of 3 cases, <code>custom on 4</code> is fastest in 3.</h1>" not in html
    )  # mirrored was made faster still
    assert "<code>mirrored on 2</code> is fastest in 3" in html.partition("</h1>")[0]
    for heading in ("Speed", "Validation accuracy by time", "Training loss by epoch", "Scaling", "Seconds of a run"):
        assert html.count(f"<h3>{heading}</h3>") == 3, heading
    assert html.count("<summary>multiworker on 2, round 1</summary>") == 3
    assert html.count("≠ yes") == 0 and html.count(">≠ no</td>") == 3


def test_a_single_case_is_drawn_without_an_overview(tmp_path):
    studied(tmp_path)
    html = page.html(comparisons(tmp_path))
    assert html.count("<nav") == 0 and "times as fast as single" in html
    assert "is fastest" in html.partition("</h1>")[0]


def test_names_with_markup_are_shown_and_not_obeyed(several, tmp_path):
    html = several.read_text()
    assert "<img src=x" not in html and "alert(2)</script>" not in html
    markdown = summary.markdown(comparisons(several.parent))
    assert "<img" not in markdown and "\\|" in markdown and "<b>" not in markdown


def test_the_picture_beside_the_report_is_an_svg_that_names_each_strategy(tmp_path):
    studied(tmp_path)
    svg = page.picture(comparisons(tmp_path))
    words = [element.text for element in xml.etree.ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"single", "custom on 4", "≠ horovod on 2", "1 (base)"} <= set(words)


@pytest.mark.thorough
def test_runs_that_leave_nothing_to_draw_make_a_page_of_their_tables(tmp_path):
    made(tmp_path, error="error: no memory")
    (found,) = comparisons(tmp_path)
    assert page.picture([found]) == "" and "no run did equal work" in page.html([found])
    assert "![" not in summary.markdown([found])


def test_each_number_of_workers_has_a_dash_and_each_strategy_a_shape(several):
    palette = charts.Palette(comparisons(several.parent))
    assert len({palette.dash(count) for count in palette.workers}) == len(palette.workers) == 3
    assert len({palette.shape(label) for label in palette.labels}) == len(palette.labels) == 5


@chromium.needed
def test_a_browser_draws_all_pictures_and_asks_for_nothing(opened, tmp_path):
    tab = opened()
    pictures = tab.run("document.querySelectorAll('.picture').length")
    assert pictures == tab.run("document.querySelectorAll('.picture svg.marks').length") > 15
    assert str(pictures) == tab.run("document.documentElement.dataset.drawn")
    assert tab.complaints == [] and len(tab.requested) == 1
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert EVIL in tab.run("document.body.innerText")
    tab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


@chromium.needed
def test_a_strategy_that_is_pressed_is_hidden_in_every_picture_and_comes_back(opened):
    tab = opened()
    marks = "document.querySelectorAll('.picture .mark-symbol path, .picture .mark-rect path').length"
    before = tab.run(marks)
    press = "[...document.querySelectorAll('button[data-cell=\"custom on 4\"]')]"
    assert tab.run(f"{press}.length") == 4
    tab.run(f"{press}[1].click()")
    assert tab.wait(f"{marks} < {before}")
    assert tab.run(f"{press}.every(one => one.getAttribute('aria-pressed') === 'false')")
    tab.run(f"{press}[0].click()")
    assert tab.wait(f"{marks} === {before}")


@chromium.needed
def test_a_point_under_the_pointer_says_its_figures(opened):
    tab = opened()
    script = "(() => { const r = document.querySelector('#answer .mark-symbol path').getBoundingClientRect();"
    x, y = tab.run(f"{script} return [r.x + r.width / 2, r.y + r.height / 2]; }})()")
    tab.move(x, y)
    said = tab.wait("document.querySelector('#vg-tooltip-element.visible')?.innerText")
    assert "times as fast" in said and "strategy" in said


@chromium.needed
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_page_is_as_wide_as_the_window_on_a_phone_too(opened, width):
    tab = opened(width=width)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run(
        "[...document.querySelectorAll('.picture svg')].every(one => one.getBoundingClientRect().width > 250)"
    )


# The labels of each picture, without the outlines under them, that overlap or leave the window.
COLLIDING = """[...document.querySelectorAll('.picture svg')].flatMap(svg => {
  const labels = [...svg.querySelectorAll('text')].filter(label => label.textContent && !label.getAttribute('stroke'));
  const boxes = labels.map(label => [label.textContent, label.getBoundingClientRect()]);
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
  const pairs = boxes.flatMap(([first, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => meet(a, b)).map(([second]) => `${first} / ${second}`));
  return pairs.concat(boxes.filter(([, a]) => a.left < 0 || a.right > innerWidth).map(([cut]) => `cut: ${cut}`));
})"""


@chromium.needed
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_label_of_a_picture_meets_another_and_no_column_of_a_table_is_cut(opened, width):
    tab = opened(width=width)
    assert tab.run(COLLIDING) == []
    cut = "[...document.querySelectorAll('.table')].filter(one => one.scrollWidth > one.clientWidth).length"
    assert tab.run(cut) == 0
    heading = "getComputedStyle(document.querySelector('td'), '::before').content"
    assert (tab.run(heading) == '"times as fast"') == (width < 900)  # which is in the first row of a wide table


@chromium.needed
def test_the_axis_of_epochs_has_whole_numbers(opened):
    ticks = (
        "[...document.querySelectorAll('figure')].filter(one => one.querySelector('h3')?.innerText.endsWith('epoch'))"
    )
    labels = "one.querySelectorAll('.role-axis-label')[0].querySelectorAll('text')"
    found = opened(width=390).run(f"{ticks}.map(one => [...{labels}].map(label => label.textContent))")
    assert found and all(label.isdecimal() for labels in found for label in labels), found


@chromium.needed
def test_a_dark_screen_has_a_dark_page_and_paper_a_light_one(opened):
    tab = opened()
    text = "getComputedStyle(document.querySelector('.picture text')).fill"
    colors = f"[getComputedStyle(document.body).backgroundColor, {text}]"
    light = tab.run(colors)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = tab.run(colors)
    assert light != dark and dark[0] == "rgb(20, 24, 29)"
    tab.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.run(colors)[0] == light[0] == "rgb(255, 255, 255)"
    assert tab.pdf().startswith(b"%PDF")
    tab.call("Emulation.setEmulatedMedia", media="", features=[])


def answer(server, host):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", "/", headers={"Host": host})
    response = connection.getresponse()
    return response.status, response.read() if response.status == 200 else b""


def test_a_request_by_another_name_is_refused():
    """Otherwise a web site whose name resolves to this machine (DNS rebinding) could read the page."""
    with page.serving("<p>secret</p>") as server:
        for host in ("evil.example", f"evil.example:{server.server_port}"):
            assert answer(server, host) == (403, b"")
        for name in ("127.0.0.1", "localhost"):
            assert answer(server, f"{name}:{server.server_port}") == (200, b"<p>secret</p>")


def test_the_page_is_served_on_this_machine_alone():
    with page.serving("<p>ä</p>") as server:
        address = page.address(server)
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.read() == "<p>ä</p>".encode()
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}../measured.json", timeout=10)
        with pytest.raises(UsageError, match="cannot be shown on port"), page.serving("", server.server_port):
            pass
    with pytest.raises(UsageError, match="port 70000"), page.serving("", 70000):
        pass


@pytest.mark.thorough
def test_the_command_serves_the_page_until_it_is_interrupted(tmp_path):
    made(tmp_path / "runs")
    command = [sys.executable, "-m", "tfdist.report", str(tmp_path / "runs"), "--out", str(tmp_path), "--serve"]
    # A shell that runs the tests in the background has interrupts ignored, by what it starts too.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard)  # noqa: PLW1509
    try:
        address = next(line for line in process.stdout if "http://" in line).split()[4]
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.read() == (tmp_path / "report.html").read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
