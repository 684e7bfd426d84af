"""Coverage-guided fuzzing of the readers with atheris: ``python -m tests.fuzz.read_dumps CORPUS -max_total_time=120``.

Whatever the bytes, reading ends with a dump or with :class:`DumpFormatError` in one line; anything else is a finding
(atheris writes the input to ``crash-*``), as is an input that takes long or much memory. ``--make-corpus FOLDER``
writes the seeds; further options are libFuzzer's own. An input that begins with ``inner:`` is the pickle inside a torch
file: the archive around it is made whole again, so that the fuzzer gets past its checks.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_instrument._errors import DumpFormatError

__all__ = ["make_corpus", "read_bytes"]

_INNER = b"inner:"


def read_bytes(content: bytes, folder: Path) -> str:
    """Read ``content`` in every way that the command line has; returns what became of it in a word.

    Raises whatever leaves the readers although it must not, and AssertionError for a message of several lines.
    """
    from slime_instrument._format.summary import inspect_dump
    from slime_instrument._validate import validate_files

    path = folder / "0.pt"
    if content.startswith(_INNER):
        _wrap(content[len(_INNER) :], path)
    else:
        path.write_bytes(content)
    message = ""
    try:
        record = inspect_dump(path)
    except DumpFormatError as error:
        message, outcome = str(error), "refused"
    else:
        outcome = str(record["kind"])
    assert "\n" not in message, f"several lines: {message!r}"
    report = validate_files([path])
    # A file that cannot be shown may still be looked at for what is wrong with it, never the other way round.
    assert not (report.valid if outcome == "refused" else report.unreadable), f"{outcome}, but {report.as_dict()}"
    return outcome


def _wrap(pickled: bytes, path: Path) -> None:
    """A torch file with this pickle in it, and with some bytes for its tensors."""
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for number in range(4):
            archive.writestr(f"archive/data/{number}", bytes(24))
        archive.writestr("archive/version", "3\n")


def make_corpus(folder: Path) -> list[Path]:
    """Small files of every form that the readers know."""
    import pickle
    import zipfile

    import torch

    folder.mkdir(parents=True, exist_ok=True)
    sample = {
        "data_parallel_rank": 0,
        "rollout_position": 0,
        "sample_index": 0,
        "tokens": torch.arange(3),
        "total_lengths": 3,
        "response_lengths": 2,
        "loss_masks": torch.ones(2),
        "log_probs": torch.zeros(2),
    }
    shard = {"rank": 0, "data_parallel_rank": 0, "sample_indices": [0], "partition": [0]}
    v2 = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": [sample], "dp_shards": [shard]}
    columns = {
        "tokens": [torch.arange(3)],
        "total_lengths": [3],
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
    }
    rank = {"rollout_id": 0, "rank": 0, "rollout_data": columns}
    rollout_sample = {"index": 0, "tokens": [1, 2, 3], "response_length": 2, "reward": 1.0, "status": "completed"}
    rollout = {"rollout_id": 0, "samples": [rollout_sample]}
    seeds: dict[str, Callable[[Path], Any]] = {
        "v2": lambda path: torch.save(v2, path),
        "rank": lambda path: torch.save(rank, path),
        "rollout": lambda path: torch.save(rollout, path),
        "pickled-list": lambda path: path.write_bytes(pickle.dumps([rollout_sample])),
        "foreign-zip": lambda path: zipfile.ZipFile(path, "w").close(),
        "text": lambda path: path.write_bytes(b"no dump"),
    }
    for name, write in seeds.items():
        write(folder / name)
    for name in ("v2", "rank", "rollout"):
        with zipfile.ZipFile(folder / name) as archive:
            pickled = next(member for member in archive.namelist() if member.endswith("/data.pkl"))
            (folder / f"inner-{name}").write_bytes(_INNER + archive.read(pickled))
    return sorted(folder.iterdir())


def main() -> None:
    import atheris  # type: ignore[import-untyped]

    followed = [
        "slime_instrument._format",
        "slime_instrument._validate",
        "pickle",
        "zipfile",
        "torch._weights_only_unpickler",
    ]
    with atheris.instrument_imports(include=followed):
        import slime_instrument._format.summary
        import slime_instrument._validate  # noqa: F401 - imported here to be followed by the fuzzer
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atheris.Setup(sys.argv, lambda content: read_bytes(content, folder) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make-corpus"]:
        print(*make_corpus(Path(sys.argv[2])), sep="\n")
    else:
        main()
