"""The documents hold: README's code runs, the files and commands that the documents name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGES.md")
FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)*\.(py|md|toml|txt|csv|png|json)|\.ci/run|[\w-]+(/[\w-]+)*/|LICENSE|Makefile")


def code_blocks(text: str) -> list[tuple[int, str]]:
    """(line number, code) of every fenced block marked ``python``; blocks marked otherwise are for reading only."""
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)]


def named_files(text: str) -> set[str]:
    """Relative link targets, and inline code that looks like a file or, with a slash at its end, a folder."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    links = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:|#", target)}
    return links | {code for code in re.findall(r"`([^`\n]+)`", prose) if FILE.fullmatch(code)}


README_BLOCKS = code_blocks((ROOT / "README.md").read_text())


def test_readme_has_code_to_run():
    assert README_BLOCKS


@pytest.mark.parametrize("line, code", README_BLOCKS, ids=lambda value: f"line-{value}" if isinstance(value, int) else "")
def test_readme_code_runs(line, code):
    # The blank lines make a traceback name README's own line.
    exec(compile("\n" * (line - 1) + code, str(ROOT / "README.md"), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document):
    text = (ROOT / document).read_text()
    missing = [name for name in sorted(named_files(text)) if not any(ROOT.glob(name.rstrip("/")))]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_make_commands_exist(document):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / document).read_text(), re.M)) <= targets


def test_measured_tables_have_their_places():
    """benchmark scripts write between these marks."""
    readme = (ROOT / "README.md").read_text()
    opened, closed = re.findall(r"<!-- table:(\w+) -->", readme), re.findall(r"<!-- /table -->", readme)
    assert opened and len(opened) == len(closed) == len(set(opened))


def test_what_counts_as_a_named_file():
    text = "[a](docs/a.md#top) [b](https://x.org/c.md) [c](#here) `kernels/` `setup.py` `a.b` `tests/test_*.py`\n```py\n`no.py`\n```\n"
    assert named_files(text) == {"docs/a.md", "kernels/", "setup.py", "tests/test_*.py"}


def test_what_counts_as_code_to_run():
    assert code_blocks("x\n```python\na = 1\n```\n```py\nb\n```\n```python\nc\n```\n") == [(3, "a = 1\n"), (9, "c\n")]
