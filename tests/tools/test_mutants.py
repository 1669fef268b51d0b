"""mutants.py tells faults that tests catch from those that survive, and its list fits the sources."""

import pytest
from mutant_faults import FAULTS, Fault
from mutants import COPIED, main, problem

NAMED = ("tests/test_sum.py",)
CAUGHT = Fault("a wrong sum", "ssta/sums.py", "a + b", "a - b", NAMED)
SEEN_BY_NOBODY = Fault("a wrong product", "ssta/sums.py", "a * b", "a / b", NAMED)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_be_planted(fault):
    """Where code moved, its fault must follow, or be replaced by one that the new code can have."""
    assert not problem(fault)


def test_names_tell_faults_apart():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    # What other packages add to pytest takes longer to import than these tests to run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in COPIED:
        if "." in name:
            (tmp_path / name).write_text("[tool.pytest.ini_options]\naddopts = '--import-mode=importlib -p xdist.plugin'\n")
        else:
            (tmp_path / name).mkdir()
    (tmp_path / "ssta" / "__init__.py").touch()
    (tmp_path / "ssta" / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n")
    (tmp_path / "src" / "ssta").symlink_to("../ssta")
    (tmp_path / NAMED[0]).write_text("from ssta.sums import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n")
    return tmp_path


def run(repository, *faults, words=()):
    said = []
    return main(list(words), faults, repository, said.append), "\n".join(said)


def test_a_fault_is_caught_or_survives(repository):
    """One that is no Python is not caught."""
    before = (repository / "ssta" / "sums.py").read_text()
    status, said = run(repository, CAUGHT, SEEN_BY_NOBODY, Fault("nonsense", "ssta/sums.py", "a + b", "a +", NAMED))
    assert status == 1 and "caught: a wrong sum: FAILED tests/test_sum.py::test_sum" in said
    assert "SURVIVED: a wrong product: the tests pass" in said and "SURVIVED: nonsense: pytest stopped with" in said
    assert said.endswith("1 of 3 faults caught") and (repository / "ssta" / "sums.py").read_text() == before
    assert run(repository, CAUGHT, SEEN_BY_NOBODY, words=["sum"])[0] == 0


@pytest.mark.parametrize("changes, message", [
    ({"old": "a"}, "ssta/sums.py has the text 5 times, not once"), ({"old": "a % b"}, "0 times"), ({"file": "ssta/none.py"}, "there is no"),
    ({"new": "a + b"}, "it changes nothing"), ({"tests": ("tests/test_sum.py::test_none",)}, "there is no tests/test_sum.py::test_none")])
def test_what_cannot_be_planted_is_said(repository, changes, message):
    status, said = run(repository, Fault(**vars(CAUGHT) | changes))
    assert status == 1 and message in said


def test_tests_that_fail_by_themselves_are_said(repository):
    (repository / NAMED[0]).write_text("def test_sum():\n    assert False\n")
    status, said = run(repository, CAUGHT)
    assert status == 1 and said.startswith("without any fault the tests do not pass")


def test_names_and_words(repository, capsys):
    status, said = run(repository, CAUGHT, SEEN_BY_NOBODY, words=["--list"])
    assert status == 0 and said == "a wrong sum  (ssta/sums.py)\na wrong product  (ssta/sums.py)"
    with pytest.raises(SystemExit):
        run(repository, CAUGHT, words=["difference"])
    assert "words must be part of a fault's name, got difference" in capsys.readouterr().err
