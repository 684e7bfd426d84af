"""The fuzz target's oracle, on its seeds and on blind changes of them; atheris needs a run of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.read_dumps import make_corpus, read_bytes


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        ("v2", "train-v2"),
        ("inner-v2", "train-v2"),
        ("rank", "train-rank"),
        ("rollout", "rollout"),
        ("pickled-list", "rollout"),
        ("foreign-zip", "refused"),
        ("text", "refused"),
    ],
)
def test_every_seed_is_what_it_is_made_for(seed: str, kind: str, tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    assert read_bytes((tmp_path / "corpus" / seed).read_bytes(), tmp_path) == kind


def test_changed_and_cut_seeds_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    chance, outcomes = random.Random(0), set()
    seeds = [path.read_bytes() for path in make_corpus(tmp_path / "corpus")]
    for _ in range(1500):
        content = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        outcomes.add(read_bytes(bytes(content[: chance.choice((None, len(content) // 2))]), tmp_path))
    assert {"refused", "train-v2", "rollout"} <= outcomes
