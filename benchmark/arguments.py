"""The command-line arguments that the benchmarks share, and what they refuse."""

from __future__ import annotations

import argparse
import re

from shapes import KernelShape

SHAPE = "TOKENS,KEPT[,BLOCK[,HEADS[,HEAD_DIM]]]"


def new_parser(doc: str) -> argparse.ArgumentParser:
    """A parser that prints ``doc`` as its help and knows ``--csv``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="NAME", type=csv_name, help="also write benchmark/results/NAME.csv")
    return parser


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--rounds", type=rounds, default=default, help=f"interleaved rounds; the median is reported (default {default})")


def csv_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w-]*", text):
        raise argparse.ArgumentTypeError(f"NAME must be letters, digits, _ and -, without folder or ending, got {text!r}")
    return text


def rounds(text: str) -> int:
    return _at_least_one("a number of rounds", text)


def kernel_shape(text: str) -> KernelShape:
    """The ``KernelShape`` that a text in the form of ``SHAPE`` stands for."""
    names, parts = ("TOKENS", "KEPT", "BLOCK", "HEADS", "HEAD_DIM"), text.split(",")
    if not 2 <= len(parts) <= len(names):
        raise argparse.ArgumentTypeError(f"a shape must be {SHAPE}, got {text!r}")
    shape = KernelShape(*(_at_least_one(name, part) for name, part in zip(names, parts)))
    if shape.tokens % shape.block:
        raise argparse.ArgumentTypeError(f"TOKENS must be a multiple of BLOCK {shape.block}, got {shape.tokens}")
    if shape.kept > shape.blocks:
        raise argparse.ArgumentTypeError(f"KEPT must be at most the {shape.blocks} blocks of {shape.tokens} tokens, got {shape.kept}")
    return shape


def _at_least_one(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name} must be a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{name} must be at least 1, got {number}")
    return number
