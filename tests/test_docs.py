"""The documents hold: their code runs, the files and commands that they name exist."""

import re
from pathlib import Path

import pytest

from ssta.pipelines.patch import register

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGES.md",
             *sorted(f"{folder}/{path.name}" for folder in ("docs", "benchmark") for path in (ROOT / folder).glob("*.md")))
FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)*\.(py|md|toml|txt|csv|png|json)|\.ci/run|[\w-]+(/[\w-]+)*/|LICENSE|Makefile")


def code_blocks(text: str) -> list[tuple[int, str]]:
    """(line number, code) of every fenced block marked ``python``; blocks marked otherwise are for reading only."""
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)]


def named_files(text: str) -> set[str]:
    """Relative link targets, and inline code that looks like a file or, with a slash at its end, a folder."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    links = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:|#", target)}
    return links | {code for code in re.findall(r"`([^`\n]+)`", prose) if FILE.fullmatch(code)}


BLOCKS = [pytest.param(document, line, code, id=f"{document}-{line}")
          for document in DOCUMENTS for line, code in code_blocks((ROOT / document).read_text())]


def test_readme_has_code_to_run_and_fits_on_a_few_screens():
    assert any(block.values[0] == "README.md" for block in BLOCKS)
    assert (ROOT / "README.md").read_text().count("\n") <= 150
    assert (ROOT / "benchmark" / "README.md").read_text().count("\n") <= 300


@pytest.mark.parametrize("document, line, code", BLOCKS)
def test_code_runs(document, line, code, monkeypatch):
    # What a document registers is not there for the tests after it.
    monkeypatch.setattr(register, "_FAMILIES", dict(register._FAMILIES))
    # The blank lines make a traceback name the document's own line.
    exec(compile("\n" * (line - 1) + code, str(ROOT / document), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document):
    """Links are relative to the document, code in backticks to the repository."""
    text = (ROOT / document).read_text()
    missing = [name for name in sorted(named_files(text))
               if not any(ROOT.glob(name.rstrip("/"))) and not (ROOT / document).parent.joinpath(name).exists()]
    assert missing == []


def headings(text: str) -> set[str]:
    """The names under which a document's headings can be linked to, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_linked_headings_exist(document):
    for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", (ROOT / document).read_text()):
        linked = (ROOT / document).parent / target if target else ROOT / document
        assert heading in headings(linked.read_text()), f"{document} links to {target}#{heading}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_make_commands_exist(document):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / document).read_text(), re.M)) <= targets


def test_nothing_says_to_install_ssta_by_name():
    """It is not on PyPI, where whoever registers the name would be installed."""
    sources = [path for folder in ("ssta", "kernels", "pipelines", "interfaces", "comfyui", "examples", "benchmark", "hub")
               for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".toml", ".txt")]
    found = [path.name for path in (*[ROOT / document for document in DOCUMENTS], *sources)
             if re.search(r"pip install [^`\n]*?(?<![\w./-])ssta\b", path.read_text())]
    assert not found


def test_measured_tables_have_their_places():
    """benchmark scripts write between these marks."""
    readme = (ROOT / "README.md").read_text()
    opened, closed = re.findall(r"<!-- table:(\w+) -->", readme), re.findall(r"<!-- /table -->", readme)
    assert opened and len(opened) == len(closed) == len(set(opened))


# A generated table, or a heading.
BOUNDARY = re.compile(r"^<!-- table:\w+ -->\n.*?^<!-- /table -->$|^#+ [^\n]*$", re.M | re.S)


def rows_that_tables_lack(text: str) -> list[str]:
    """Names of rows in prose that the generated tables beside it do not have.

    Prose lies between two tables or headings. A sentence with the word row or rows speaks of the table before it or after it: every name in
    double quotes there, and every setting in backticks (`name`, `name=value`), has to occur in one of the two; "..." stands for anything.
    """
    bounds = [re.match("", text), *BOUNDARY.finditer(text), re.compile(r"\Z").search(text)]
    lacking = []
    for before, after in zip(bounds, bounds[1:]):
        tables = "".join(bound[0] for bound in (before, after) if bound[0].startswith("<!--"))
        prose = re.sub(r"^```.*?^```|^\|[^\n]*$", "", text[before.end():after.start()], flags=re.M | re.S)
        for sentence in re.split(r"(?<=[.:])\s", " ".join(prose.split())) if tables else ():
            if re.search(r"\brows?\b", sentence, re.I):
                names = re.findall(r"`(\w+(?:=[^`]*)?)`", sentence) + re.findall(r'"([^"`]+)"', re.sub(r"`[^`]*`", "", sentence))
                lacking += [name for name in names if not re.search(re.escape(name).replace(r"\.\.\.", ".*"), tables)]
    return lacking


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_have_the_rows_that_prose_beside_them_names(document):
    assert rows_that_tables_lack((ROOT / document).read_text()) == []


def test_what_counts_as_a_row_that_a_table_lacks():
    """Sentences that stood beside tables without such rows."""
    table = "<!-- table:x -->\n| model | attention |\n|---|---|\n| A | SSTA by default |\n<!-- /table -->\n"
    other = table.replace("SSTA by default", '`pad_type="zero"`')
    assert rows_that_tables_lack(f"Rows with a\n`pad_type` have the settings of a checkpoint:\n\n{table}\nText.\n\n{other}") == ["pad_type"]
    assert rows_that_tables_lack(f'# A\n\n{table}\nText. Rows with `pad_type="none"` are not the default.\n') == ['pad_type="none"']
    assert rows_that_tables_lack(f'{table}\nThe row "dense" is slow. "Quoted" words elsewhere are not meant, `nor` these.\n') == ["dense"]
    assert rows_that_tables_lack(f'Rows with a `pad_type` are here:\n{other}\n# Next\n\nRows with `density` are of no table.\n') == []


def test_what_counts_as_a_named_file():
    text = "[a](docs/a.md#top) [b](https://x.org/c.md) [c](#here) `kernels/` `setup.py` `a.b` `tests/test_*.py`\n```py\n`no.py`\n```\n"
    assert named_files(text) == {"docs/a.md", "kernels/", "setup.py", "tests/test_*.py"}


def test_what_counts_as_code_to_run():
    assert code_blocks("x\n```python\na = 1\n```\n```py\nb\n```\n```python\nc\n```\n") == [(3, "a = 1\n"), (9, "c\n")]
