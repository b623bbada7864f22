"""What is new in a version, out of CHANGELOG.md: ``scripts/release_notes.py [VERSION]``; by default what is unreleased."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"


def notes(version: str = "Unreleased", text: str | None = None) -> str:
    """The part of the changelog about ``version``. Raises ``LookupError`` where there is none."""
    whole = CHANGELOG.read_text(encoding="utf-8") if text is None else text
    parts = re.split(r"^## \[?([^\]\s]+)\]?.*\n", whole, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=False))
    if version not in sections:
        raise LookupError(f"CHANGELOG.md has nothing on {version}: it has {', '.join(sections)}")
    return sections[version].strip() + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(notes(*sys.argv[1:2]))
    except LookupError as problem:
        sys.exit(f"Error: {problem.args[0]}")
