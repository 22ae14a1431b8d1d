"""What `make docs` adds to the pages: the results of benchmarks."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
_RESULT = re.compile(r"\((?:\.\./)+benchmarks/results/(\w+\.(?:png|json))\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the results, which are stored next to the benchmarks, to the site's files."""
    for path in sorted(RESULTS.iterdir()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page, whose links to results lead to the site's copies."""
    folder = posixpath.dirname(page.file.src_uri) or "."
    return _RESULT.sub(lambda found: f"({posixpath.relpath(f'results/{found[1]}', folder)})", markdown)
