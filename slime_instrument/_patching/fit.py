"""Which patches fit: asked of an imported module when arming, and of a source tree by ``check``. One set of rules."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import wrapt

from slime_instrument._patching.patch import Patch, PatchStatus, State, Target, without
from slime_instrument._patching.trampoline import parameters


@dataclass(frozen=True)
class Signature:
    """The named parameters of a plain function, and whether it takes any further keyword."""

    names: tuple[str, ...]
    takes_any: bool


def misfit(patch: Patch, target: Target, found: Signature | str | None) -> str | None:
    """Why ``patch`` does not fit what was found at ``target``; None when it does. ``found``: None for nothing there,
    a text for what there is in place of a plain function."""
    if found is None:
        return f"{target.module} has no {target.attribute}"
    if isinstance(found, str):
        return f"{target} {found}"
    lacking = [name for name in patch.takes if name not in found.names]
    if lacking and not found.takes_any:
        return f"{target} takes ({', '.join(found.names)}); expected also {', '.join(lacking)}"
    return None


def stepping_back(patches: Iterable[Patch], broken: Iterable[Patch]) -> dict[str, Patch]:
    """Patch name -> the broken patch because of which it cannot stay; the broken ones themselves are not among them.

    A patch stays only together with its group and the groups it needs. Optional patches break nothing.
    """
    broken = list(broken)
    sound = [patch for patch in patches if patch not in broken]
    causes = {patch.group: patch for patch in broken if not patch.optional}
    found: dict[str, Patch] = {}
    grown = True
    while grown:  # a group that needs a broken one is broken too, and so on
        grown = False
        for patch in sound:
            cause = next((causes[group] for group in (patch.group, *patch.needs) if group in causes), None)
            if cause is None or patch.name in found:
                continue
            found[patch.name] = cause
            if patch.group not in causes:
                causes[patch.group], grown = cause, True
    return found


# ---------------------------------------------------------------- an imported module


def look_at(module: ModuleType, attribute: str) -> Signature | str | None:
    """What stands at ``attribute``, for :func:`misfit`. Changes nothing."""
    try:
        found = wrapt.resolve_path(module, attribute)[2]
    except (wrapt.PathResolutionError, AttributeError):
        return None
    if isinstance(found, (staticmethod, classmethod, type)) or not callable(found):
        return f"is a {type(found).__name__}; expected a plain function"
    try:
        names, takes_any = parameters(found)
    except (TypeError, ValueError):
        return "has no signature that can be read"
    return Signature(tuple(names), takes_any)


# ---------------------------------------------------------------- a source tree; nothing of it is imported or run


@dataclass(frozen=True)
class Imported:
    """A name that a module has from another one."""

    module: str
    name: str


Found = Signature | Imported | str


@dataclass(frozen=True)
class SourceModule:
    """The names of a module file, those of classes as ``Class.name``. Functions have their signature, names from other
    modules say from where; the others have a text."""

    path: Path
    names: dict[str, Found]
    stars: list[str]
    """Modules of which it has all names."""


def read_module(root: Path, name: str) -> SourceModule | None:
    """The module ``name`` below ``root``; None when there is no such file. SyntaxError when it cannot be parsed."""
    base = root.joinpath(*name.split("."))
    path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
    if path is None:
        return None
    module = SourceModule(path, {}, [])
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    _collect(ast.parse(path.read_bytes(), filename=str(path)).body, "", package, module)
    return module


def look_up(root: Path, target: Target, most: int = 8) -> Signature | str | None:
    """What stands at ``target`` in the source tree ``root``, for :func:`misfit`; imported names are followed, up to
    ``most`` times."""
    module = read_module(root, target.module)
    if module is None:
        return None
    found = module.names.get(target.attribute)
    first, _, rest = target.attribute.partition(".")
    origin = module.names.get(first)
    if most and isinstance(origin, Imported):
        behind = Target(origin.module, f"{origin.name}.{rest}" if rest else origin.name)
        return look_up(root, behind, most - 1) or "is imported; expected a plain function"
    if most and origin is None:
        behinds = (look_up(root, Target(star, target.attribute), most - 1) for star in module.stars)
        return next((each for each in behinds if each is not None), None)
    return "is imported; expected a plain function" if isinstance(found, Imported) else found


def probe(patches: Iterable[Patch], root: Path) -> list[PatchStatus]:
    """What each patch would become where its targets are imported from ``root``."""
    found = [(patch, *_probe_one(patch, root)) for patch in patches]
    broken = [patch for patch, _, state, _ in found if state is State.INCOMPATIBLE]
    causes = stepping_back([patch for patch, *_ in found], broken)
    statuses = []
    for patch, target, state, reason in found:
        lacks = causes[patch.name].name if state is State.PENDING and patch.name in causes else None
        if lacks is not None:
            state, reason = State.SKIPPED, without(lacks)
        statuses.append(PatchStatus(patch.name, patch.group, str(target), str(state), reason, 0, 0, lacks))
    return statuses


def _probe_one(patch: Patch, root: Path) -> tuple[Target, State, str]:
    if patch.unless is not None and look_up(root, patch.unless.target) is not None:
        return patch.targets[0], State.SKIPPED, patch.unless.reason
    reasons = []
    for target in patch.targets:
        if read_module(root, target.module) is None:
            reasons.append(f"there is no module {target.module}")
            continue
        why_not = misfit(patch, target, look_up(root, target))
        if why_not is None:
            return target, State.PENDING, "fits"
        reasons.append(why_not)
    return patch.targets[-1], State.INCOMPATIBLE, "; ".join(reasons)


def _collect(body: Iterable[ast.stmt], prefix: str, package: str, found: SourceModule) -> None:
    names = found.names
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            names[prefix + node.name] = Signature(tuple(a.arg for a in named), arguments.kwarg is not None)
        elif isinstance(node, ast.ClassDef):
            names[prefix + node.name] = "is a class; expected a plain function"
            _collect(node.body, f"{prefix}{node.name}.", package, found)
        elif isinstance(node, ast.ImportFrom) and not prefix:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*":
                    found.stars.append(module)
                else:
                    names[alias.asname or alias.name] = Imported(module, alias.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names[prefix + (alias.asname or alias.name.split(".")[0])] = "is imported; expected a plain function"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update({prefix + t.id: "is no plain function" for t in targets if isinstance(t, ast.Name)})
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            for handler in getattr(node, "handlers", ()):
                inner += handler.body
            _collect(inner, prefix, package, found)
