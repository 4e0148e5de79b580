"""Adds pages outside of `docs/` to the site, and converts links between files of the repository; see `mkdocs.yml`.

README.md is the first page. Links to files that are not pages, such as source code, are replaced by their text.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
# `[text](target#anchor)`, where the target is neither a URL nor the same page.
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages in `PAGES`."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turns links between files of the repository into links between pages."""
    uri = page.file.src_uri
    folder = os.path.dirname(SOURCES.get(uri, f"docs/{uri}"))

    def convert(match: re.Match[str]) -> str:
        text, target, anchor = match.groups(default="")
        path = os.path.normpath(os.path.join(folder, target))
        on_site = PAGES.get(path, path.removeprefix("docs/"))
        if not files.get_file_from_path(on_site) and (ROOT / path).exists():
            return text
        return f"[{text}]({os.path.relpath(on_site, os.path.dirname(uri) or '.')}{anchor})"

    return LINK.sub(convert, markdown)
