"""The pages of the site that are not in `docs/`, and the links between files of the repository; see `mkdocs.yml`.

README.md is the first page. Files that are no page, such as source code, keep the text of their links only.
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
# `[text](target#anchor)`, where the target is neither an address of the web nor the same page.
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made of files elsewhere in the repository."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turns links between files of the repository into links between pages."""
    uri = page.file.src_uri
    folder = os.path.dirname(SOURCES.get(uri, f"docs/{uri}"))

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found.groups(default="")
        path = os.path.normpath(os.path.join(folder, target))
        on_site = PAGES.get(path, path.removeprefix("docs/"))
        if not files.get_file_from_path(on_site) and (ROOT / path).exists():
            return text
        return f"[{text}]({os.path.relpath(on_site, os.path.dirname(uri) or '.')}{anchor})"

    return LINK.sub(linked, markdown)
