"""Whether patches fit a source tree, by reading it: nothing of the target is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from slime_instrument._patching.declaration import Patch, State, Target
from slime_instrument._patching.status import PatchStatus

__all__ = ["SourceModule", "probe", "read_module"]


@dataclass
class SourceModule:
    """The names of a module file. Functions and methods have their parameters; other names have None.

    Top-level names can also be asked for with ``hasattr``, as of an imported module.
    """

    path: Path
    names: dict[str, tuple[list[str], bool] | None] = field(default_factory=dict)

    def __getattr__(self, name: str) -> object:
        if name in self.__dict__.get("names", {}):
            return self.names[name]
        raise AttributeError(name)


def read_module(root: Path, name: str) -> SourceModule | None:
    """The module ``name`` below ``root``; None when there is no such file. SyntaxError when it cannot be parsed."""
    base = root.joinpath(*name.split("."))
    path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
    if path is None:
        return None
    module = SourceModule(path)
    _collect(ast.parse(path.read_bytes(), filename=str(path)).body, "", module.names)
    return module


def probe(patches: Iterable[Patch], root: Path) -> list[PatchStatus]:
    """What each patch would become where slime is imported from ``root``."""
    found = {patch.name: (patch, *_probe_one(patch, root)) for patch in patches}
    misfits = [patch for patch, _, state, _ in found.values() if state is State.INCOMPATIBLE and not patch.optional]
    broken = {patch.group: patch for patch in misfits}
    while True:  # groups that need a broken group are broken too, and so on
        grown = {
            patch.group: broken[need]
            for patch, _, _, _ in found.values()
            for need in patch.needs
            if need in broken and patch.group not in broken
        }
        if not grown:
            break
        broken |= grown
    statuses = []
    for patch, target, state, reason in found.values():
        cause = next((broken[group] for group in (patch.group, *patch.needs) if group in broken), None)
        if state is State.PENDING and cause is not None:
            state, reason = State.SKIPPED, f"steps back together with {cause.name!r}"
        statuses.append(PatchStatus(patch.name, patch.group, str(target), str(state), reason, 0, 0))
    return statuses


def _probe_one(patch: Patch, root: Path) -> tuple[Target, State, str]:
    reasons = []
    for target in patch.targets:
        module = read_module(root, target.module)
        why_not = _misfit(patch, target, module)
        if module is not None and why_not is None:
            unneeded = patch.unneeded(module)
            if unneeded is not None:
                return target, State.SKIPPED, unneeded
            return target, State.PENDING, "fits; applied when slime is imported"
        if why_not is not None:
            reasons.append(why_not)
    return patch.targets[-1], State.INCOMPATIBLE, "; ".join(reasons)


def _misfit(patch: Patch, target: Target, module: SourceModule | None) -> str | None:
    if module is None:
        return f"there is no module {target.module}"
    if target.attribute not in module.names:
        return f"{target.module} has no {target.attribute}"
    signature = module.names[target.attribute]
    if patch.replace is not None:
        return None
    if signature is None:
        return f"{target} is no plain function"
    taken, takes_any = signature
    lacking = [name for name in patch.relies_on if name not in taken]
    if lacking and not takes_any:
        return f"{target} takes ({', '.join(taken)}); expected also {', '.join(lacking)}"
    return None


def _collect(body: Iterable[ast.stmt], prefix: str, names: dict[str, tuple[list[str], bool] | None]) -> None:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            names[prefix + node.name] = ([a.arg for a in named], arguments.kwarg is not None)
        elif isinstance(node, ast.ClassDef):
            names[prefix + node.name] = None
            _collect(node.body, f"{prefix}{node.name}.", names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names[prefix + (alias.asname or alias.name.split(".")[0])] = None
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update({prefix + t.id: None for t in targets if isinstance(t, ast.Name)})
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            for handler in getattr(node, "handlers", ()):
                inner += handler.body
            _collect(inner, prefix, names)
