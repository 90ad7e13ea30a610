"""Write the pages of terms from the table in the package: ``python scripts/terms.py``.

docs/terms.md and docs/terms.zh.md have the words of PyTorch and its tutorials, docs/coming-from.md those of libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.recipe.terms import Section, Term, read_sections

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- names: written by scripts/terms.py -->", "<!-- end of names -->"


def write_tables(page: str, text: str) -> str:
    """Return the text of a page, ``terms.md`` for example, with its tables written again."""
    before, _, rest = text.partition(BEGIN)
    lines = _library_tables() if page == "coming-from.md" else _word_tables(page.endswith(".zh.md"))
    return f"{before}{BEGIN}\n\n{chr(10).join(lines)}\n{END}{rest.partition(END)[2]}"


def _library_tables() -> Iterator[str]:
    """Yield a section a library, with a line for what is called one thing here."""
    for section in read_sections():
        if section.zh:
            continue
        yield from (f"## {section.title[0].upper()}{section.title[1:]}", "")
        if section.about:
            yield from (section.about, "")
        yield from ("| there | here | |", "|---|---|---|")
        for term in section.terms:
            own = [f"`{there}`: {f'`{here}`' if here else 'leave it out'}" for there, here in term.values.items()]
            yield _row(_names(term), "; ".join([_here(term, "nothing"), *own]), term.note)
        yield ""


def _word_tables(is_chinese: bool) -> Iterator[str]:
    """Yield a section a field, with a line for each word that has a Chinese note."""
    for section in read_sections():
        terms = [term for term in section.terms if term.zh]
        if terms:
            yield from (f"## {_title(section, is_chinese)}", "")
            yield "| 词 | 在 paceline 里 | | 页面 |" if is_chinese else "| word | here | | page |"
            yield "|---|---|---|---|"
            for term in terms:
                link = f"[{term.page.partition('#')[0].removesuffix('.md')}]({term.page})"
                here = _here(term, "无" if is_chinese else "nothing")
                yield _row(_names(term), here, term.zh if is_chinese else term.note, link)
            yield ""


def _title(section: Section, is_chinese: bool) -> str:
    return section.zh if is_chinese and section.zh else f"{section.title[0].upper()}{section.title[1:]}"


def _names(term: Term) -> str:
    return ", ".join(f"`{name}`" if name.isascii() else name for name in term.names)


def _here(term: Term, nothing: str) -> str:
    return f"`{term.shown_here}`" if term.here else nothing


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    for name in ("terms.md", "terms.zh.md", "coming-from.md"):
        path = DOCS / name
        path.write_text(write_tables(name, path.read_text(encoding="utf-8")), encoding="utf-8")
