"""The documents build as a site: no dead link, no page outside the navigation, no request to a host."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import chromium

ROOT = Path(__file__).parent.parent
# What a browser loads by itself: not the links that a reader follows.
LOADED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*\b(?:href|src)=\"?((?:https?:)?//[^\" >]*)")

pytest.importorskip("mkdocs", reason="mkdocs is not installed (the extra `dev`)")
pytest.importorskip("material", reason="mkdocs-material is not installed (the extra `dev`)")
pytest.importorskip("mkdocstrings", reason="mkdocstrings-python is not installed (the extra `dev`)")


def build(root, site):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", root / "mkdocs.yml", "--site-dir", site],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.thorough
def test_the_first_page_is_the_readme(site):
    page = (site / "index.html").read_text()
    assert "Which strategy should I use?" in page and 'href="contract.html#verify"' in page


def test_the_reference_has_the_public_names(site):
    names = {
        "tfdist": ["tfdist.strategy", "tfdist.gather", "tfdist.all_reduce"],
        "strategies": ["tfdist.strategies.base.Strategy.prepare", "tfdist.strategies.custom.CustomStrategy"],
        "callbacks": ["tfdist.callbacks.Checkpoint", "tfdist.callbacks.Throughput"],
        "data": ["tfdist.data.load", "tfdist.data.Source", "tfdist.data.per_process"],
        "models": ["tfdist.models.build"],
        "horovod": ["tfdist.horovod.DistributedOptimizer", "tfdist.horovod.callbacks.MetricAverageCallback"],
        "errors": ["tfdist.errors.UsageError"],
    }
    missing = {
        name
        for page, expected in names.items()
        for name in expected
        if f'id="{name}"' not in (site / "api" / f"{page}.html").read_text()
    }
    assert not missing


def test_a_page_loads_nothing_from_a_host(site):
    pages = sorted(site.rglob("*.html"))
    styles = sorted(site.rglob("*.css"))
    assert pages and styles
    loaded = {found for page in pages for found in LOADED.findall(page.read_text())}
    loaded |= {found for style in styles for found in re.findall(r"url\([\"']?(https?:[^)]*)", style.read_text())}
    assert loaded == set()


@chromium.needed
def test_the_search_works_on_a_page_that_is_opened_as_a_file(site, tmp_path):
    with chromium.browser(tmp_path) as tab:
        tab.open((site / "index.html").as_uri() + "?q=heartbeat")
        first = tab.wait("document.querySelector('.md-search-result__link')?.href")
        assert first.startswith(site.as_uri()) and tab.complaints == []
        assert all(url.startswith(("file:", "blob:")) for url in tab.requested)


@pytest.mark.thorough
def test_mistakes_in_the_documents_are_found(tmp_path):
    """A dead link, a dead anchor and a page that is missing in the navigation; API pages are left out, for speed."""
    for name in ("docs", "benchmarks", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "api"))
    for path in ROOT.glob("*.md"):
        shutil.copy(path, tmp_path)
    config = re.sub(r"  - API reference:\n(      .*\n)+", "", (ROOT / "mkdocs.yml").read_text())
    (tmp_path / "mkdocs.yml").write_text(config)
    (tmp_path / "docs" / "lost.md").write_text("[one](nowhere.md), [two](contract.md#nothing)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    assert "'lost.md'" in built.stderr and "not included in the" in built.stderr
    assert "'nowhere.md'" in built.stderr and "'contract.md#nothing'" in built.stderr
