"""Blocks of prompts that share prefixes."""

from __future__ import annotations


def block_ids(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """An id for each token of each prompt (a block holds one), which stands for its prefix."""
    names: dict[tuple[int, ...], int] = {}
    return [
        tuple(names.setdefault(tuple(tokens[: end + 1]), len(names)) for end in range(len(tokens)))
        for tokens in prompts
    ]
