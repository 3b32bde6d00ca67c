"""The examples of ``docs/how_to/plugins.md`` and ``plugin_corrections.md``."""

import re
from pathlib import Path

PAGES = [Path(__file__).parents[2] / "docs" / "how_to" / f"{name}.md" for name in ("plugins", "plugin_corrections")]


def code_block(module: str) -> str:
    """Return the block of code that begins with the module's name."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.search(rf"```python\n# {module}\.py\n(.*?)```", text, re.S)[1]
