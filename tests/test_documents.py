"""The documents: links that lead somewhere, an example that prints what it says, and sizes that a reader can manage."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from size import words
from test_house import ROOT, repository_files

DOCS = ROOT / "docs"
GENERATED = {"families.md"}
LIMITS = {"page": 1_500, "decision": 150}
"""The most words (as `wc -w` counts) of a page that nobody generates, and of a decision."""


def pages() -> Iterator[Path]:
    """Every Markdown file of the repository."""
    return (path for path in repository_files() if path.suffix == ".md")


def prose(text: str) -> str:
    """A page without fenced blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(text: str) -> set[str]:
    """The places of a page that a link can name: its headings as GitHub writes them, and explicit ids."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def broken(page: Path, text: str) -> list[str]:
    """The relative links of a page whose file or anchor does not exist."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        name, _, anchor = link.partition("#")
        if ":" in name:
            continue
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def test_every_link_leads_somewhere() -> None:
    found = {page.relative_to(ROOT): broken(page, page.read_text(encoding="utf-8")) for page in pages()}
    assert {page: links for page, links in found.items() if links} == {}


def test_link_checker_catches() -> None:
    text = "[a](docs/drafts.md) [b](gone.md) [c](docs/drafts.md#gone) `[d](code.md)` [e](https://example.org/x.md)"
    assert broken(ROOT / "README.md", text) == ["gone.md", "docs/drafts.md#gone"]
    assert anchors("# A `b`: c, d\n```\n# no\n```\n") == {"a-b-c-d"}


def test_documents_are_short() -> None:
    by_hand = [page for page in DOCS.glob("*.md") if page.name not in GENERATED]
    assert len(by_hand) > 20
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert [page.name for page in by_hand if words(page) > LIMITS["page"]] == []
    decisions = DOCS.glob("decisions/[0-9]*.md")
    assert [page.name for page in decisions if words(page) > LIMITS["decision"]] == []


def test_the_readme_s_example_prints_what_it_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ((code, output),) = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", text, re.M | re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == output


def test_the_readme_counts_the_families_that_work() -> None:
    found = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    counts = re.findall(r"(\d+) (?:causal|encoder-decoder) architectures: (\d+) works", found)
    tried, work = (sum(map(int, column)) for column in zip(*counts, strict=True))
    assert f"{work} of {tried} architectures work" in (ROOT / "README.md").read_text(encoding="utf-8")


def law(text: str) -> list[str]:
    """The sentences of a page for users that call a distribution a law, as the code does."""
    return re.findall(r"[^.|\n]*\blaws?\b[^.|\n]*", prose(text))


def test_pages_for_users_say_distribution() -> None:
    inside = {"architecture.md", "exactness.md"}  # for readers of the code; names its word
    for page in (ROOT / "README.md", *(page for page in DOCS.glob("*.md") if page.name not in inside)):
        assert law(page.read_text(encoding="utf-8")) == [], page


@pytest.mark.parametrize("text", ["The law is p.", "| two laws |"])
def test_law_checker_catches(text: str) -> None:
    assert len(law(text)) == 1
    assert law("`Laws` in code, and a flaw.") == []
