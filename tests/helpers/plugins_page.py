"""The examples of ``docs/plugins.md``."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"


def code_block(module: str) -> str:
    """Return the page's block of code that begins with the module's name."""
    return re.search(rf"```python\n# {module}\.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]
