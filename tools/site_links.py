"""MkDocs hook: links to files of the repository outside docs/ become the path as text.

The site holds docs/ only. On the site such a link would lead nowhere; a missing file is a warning,
which ``mkdocs build --strict`` makes an error.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.site_links")
OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


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
