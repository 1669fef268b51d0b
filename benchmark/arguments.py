"""The command-line arguments that the benchmarks share, and what they refuse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from shapes import Pattern, Problem, full, kept, window

SHAPE = "TOKENS,KEPT[,BLOCK[,HEADS[,HEAD_DIM]]]"


class Unusable(ValueError):
    """A file or a folder that an argument names and that does not serve."""


def new_parser(doc: str) -> argparse.ArgumentParser:
    """A parser that prints ``doc`` as its help and knows ``--csv``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--csv", metavar="NAME", type=csv_name, help="also write benchmark/results/NAME.csv")
    return parser


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--rounds", type=rounds, default=default, help=f"interleaved rounds; the median is reported (default {default})")


def add_names(parser: argparse.ArgumentParser, option: str, shapes: Sequence) -> None:
    """``--layer`` or the like, which picks from named shapes; ``named`` says which."""
    parser.add_argument(f"--{option}", nargs="+", metavar="TEXT", help=f"only the {option}s whose name contains one of these, in small "
                        "letters: " + "; ".join(shape.name for shape in shapes))


def named(parser: argparse.ArgumentParser, option: str, texts: Sequence[str] | None, shapes: Sequence) -> list:
    """Those of ``shapes`` whose name contains one of ``texts``, all of them for None; ends the program where there is none."""
    chosen = [shape for shape in shapes if not texts or any(text.lower() in shape.name.lower() for text in texts)]
    if not chosen:
        parser.error(f"--{option} must be part of one of {', '.join(repr(shape.name) for shape in shapes)}, got {texts}")
    return chosen


def csv_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w-]*", text):
        raise argparse.ArgumentTypeError(f"NAME must be letters, digits, _ and -, without folder or ending, got {text!r}")
    return text


def rounds(text: str) -> int:
    return _at_least_one("a number of rounds", text)


def number(text: str) -> int:
    return _at_least_one("a number", text)


def kernel_shape(text: str) -> tuple[Problem, Pattern]:
    """The problem and the pattern that a text in the form of ``SHAPE`` stands for; KEPT is a number, a share, "full" or "window"."""
    parts = text.split(",")
    if not 2 <= len(parts) <= 5:
        raise argparse.ArgumentTypeError(f"a shape must be {SHAPE}, got {text!r}")
    numbers = {name: _at_least_one(name, part) for name, part in zip(("TOKENS", "BLOCK", "HEADS", "HEAD_DIM"), (parts[0], *parts[2:]))}
    problem = Problem(**{name.lower(): number for name, number in numbers.items()})
    if problem.tokens % problem.block:
        raise argparse.ArgumentTypeError(f"TOKENS must be a multiple of BLOCK {problem.block}, got {problem.tokens}")
    return problem, _pattern(parts[1], problem)


def _pattern(text: str, problem: Problem) -> Pattern:
    if text in ("full", "window"):
        return {"full": full, "window": window}[text](problem)
    if re.fullmatch(r"0?\.\d+", text) and float(text) > 0:
        return kept(problem, float(text))
    pattern = kept(problem, _at_least_one("KEPT", text))
    if pattern.kept > problem.blocks:
        raise argparse.ArgumentTypeError(f"KEPT must be at most the {problem.blocks} blocks of {problem.tokens} tokens, got {text}")
    return pattern


def _at_least_one(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name} must be a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{name} must be at least 1, got {number}")
    return number
