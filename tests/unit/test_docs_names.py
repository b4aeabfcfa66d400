"""Documents do not rot in silence: every module is named, every link leads somewhere, every variable exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.cli.arguments import parser
from shared.runtime.config import known_variables

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "shared" / "docs").rglob("*.md"), *(ROOT / "services").rglob("README.md")]
)


def modules() -> dict[str, set[str]]:
    """Folder → what ARCHITECTURE.md has to name in its section."""
    found: dict[str, set[str]] = {}
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]:
        if path.name != "__init__.py":
            top = "/".join(path.relative_to(ROOT).parts[:2])
            found.setdefault(top, set()).add("/".join(path.with_suffix("").relative_to(ROOT).parts[2:]))
    return found


def test_the_architecture_has_a_line_for_each_module_and_no_other() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    sections = dict(re.findall(r"^\*\*`([\w/]+)`\*\*(.*?)(?=^\*\*`|\Z)", text, re.MULTILINE | re.DOTALL))
    named = {f"{folder}/{name}" for folder, section in sections.items() for name in re.findall(r"`([\w/]+)`", section)}
    there = {f"{folder}/{name}" for folder, names in modules().items() for name in names}
    assert sorted(there - named) == [], "without a line"
    assert sorted(named - there) == [], "named and gone"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_every_variable_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"DEEPSERVE_[A-Z_]+[A-Z]", (ROOT / "README.md").read_text()))
    assert named
    assert named <= known_variables()


def test_every_subcommand_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (\w+) ", parser().format_help().split("COMMAND\n")[1], re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        assert re.search(rf"\b{command}\b", text), command
