"""MkDocs hooks: links out of docs/ become text, and pages that load from another host are reported.

The site holds docs/ only, so a link to another file of the repository would be broken there. Warnings
are errors under ``mkdocs build --strict``.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.site_hooks")
OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")
LOADED = re.compile(r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"(https?://[^\"]*)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the links of one page; ``config.docs_dir`` is the folder of all pages."""
    folder = Path(page.file.abs_src_path).parent
    root = Path(config.docs_dir).parent

    def as_text(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists():
            LOG.warning("%s links to %s, which does not exist", page.file.src_uri, link[2])
            return link[0]
        path = f"`{target.relative_to(root)}`"
        return path if link[1].strip("`") == path.strip("`") else f"{link[1]} ({path})"

    return OUTSIDE.sub(as_text, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Report scripts, styles and images of other hosts in the HTML of one page."""
    for address in LOADED.findall(output):
        LOG.warning("%s loads %s: the site must work without network", page.file.src_uri, address)
    return output
