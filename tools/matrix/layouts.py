"""The parallel layouts, each with the single process that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """``reference`` names the layout of one process that trains the same model. ``needs``: a slime option without
    which a release does not know this layout."""

    name: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    reference: str = "single"
    needs: str | None = None
    listed: bool = True
    """Whether it is a row of its own; some single processes are only there to be compared with."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


_EIGHT_LAYERS = {"num_layers": 8}
_NO_ROPE = {"position_embedding_type": "none"}

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("single"),
        Layout("CP2", cp=2),
        Layout("CP4", cp=4),
        Layout("DP2", dp=2),
        Layout("DP4", dp=4),
        Layout("DP2-CP2", dp=2, cp=2),
        Layout("PP2", pp=2),
        Layout("CP4-PP2", cp=4, pp=2),
        Layout("TP2-PP2-CP2", tp=2, pp=2, cp=2),
        Layout("DP2-CP2-TP2", dp=2, cp=2, tp=2),
        Layout(
            "VPP2-PP4",
            pp=4,
            overrides={**_EIGHT_LAYERS, "virtual_pipeline_model_parallel_size": 2},
            reference="single-8-layers",
        ),
        Layout(
            "allgather-CP2",
            cp=2,
            overrides={**_NO_ROPE, "allgather_cp": True},
            reference="single-no-rope",
            needs="allgather_cp",
        ),
        Layout("single-8-layers", overrides=_EIGHT_LAYERS, reference="single-8-layers", listed=False),
        Layout("single-no-rope", overrides=_NO_ROPE, reference="single-no-rope", listed=False),
    )
}

#: The two layouts on which every recipe runs.
RECIPE_LAYOUTS = ("DP2-CP2", "TP2-PP2-CP2")
