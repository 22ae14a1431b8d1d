"""What `make docs` adds to the pages: tables made from the code, and the results of benchmarks."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tests import deploy_page, metrics_page

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
MADE = {deploy_page.PAGE: deploy_page.with_tables, metrics_page.PAGE: metrics_page.with_table}
"""Pages that get tables."""
_RESULT = re.compile(r"\((?:\.\./)+benchmarks/results/(\w+\.(?:png|json))\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the results, which are stored next to the benchmarks, to the site's files."""
    for path in sorted(RESULTS.iterdir()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page with its tables. Links to results lead to the site's copies."""
    made = MADE.get(DOCS / page.file.src_uri)
    text = made(markdown) if made else markdown
    folder = posixpath.dirname(page.file.src_uri) or "."
    return _RESULT.sub(lambda found: f"({posixpath.relpath(f'results/{found[1]}', folder)})", text)
