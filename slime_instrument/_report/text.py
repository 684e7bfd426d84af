"""Token ids as text, with a tokenizer from a local folder. Nothing is fetched, and no code of the folder runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from slime_instrument._errors import InstrumentError, five_parts

__all__ = ["TokenizerError", "decoder", "texts"]


class TokenizerError(InstrumentError, ValueError):
    """The tokenizer cannot be used."""


def decoder(folder: Path) -> Callable[[int], str]:
    """What turns one token id into text: ``tokenizers`` for a tokenizer.json, else ``transformers``.

    Raises:
        TokenizerError: no tokenizer there, or neither library is installed.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.glob("*token*"))):
        found = "no tokenizer in it" if folder.exists() else "no such folder"
        raise _unusable(folder, found, "Give the folder that holds tokenizer.json.")
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(file))
            return lambda token: str(fast.decode([token], skip_special_tokens=False))
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return lambda token: str(slow.decode([token]))
    except ImportError as error:
        raise _unusable(folder, f"{error.name or 'tokenizers'} is not installed", "pip install tokenizers") from None
    # Both libraries raise bare Exceptions for files that they cannot read.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _unusable(folder, reason, "Give the folder that holds tokenizer.json.") from None


def texts(ids: Iterable[int], decode: Callable[[int], str]) -> dict[int, str]:
    """Text of each id; an id that the tokenizer does not know is left out."""
    found = {}
    for token in sorted(set(ids)):
        try:
            found[token] = decode(token)
        except Exception:
            continue
    return found


def _unusable(folder: Path, found: str, next_step: str) -> TokenizerError:
    message = five_parts(
        f"--tokenizer {folder}",
        expected="a local folder with a tokenizer",
        found=found,
        follows="No report was written.",
        next_step=next_step,
    )
    return TokenizerError(message)
