"""LoRA adapters of a served model: which scales a request gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from tilebeam.server.errors import bad_request
from tilebeam.server.requests import LoraScale


class Adapters:
    """Adapters of one model.

    Args:
        loaded: their files and scales.
        taken: names that mean the model itself.

    Attributes:
        names: what requests may give as `model` to get one alone: the name of its file without the suffix, with "-"
            and its id behind it where that is another's name.
    """

    def __init__(self, loaded: Sequence[tuple[str, float]], taken: Collection[str]) -> None:
        self._loaded = tuple(scale for _, scale in loaded)
        self.names: dict[str, int] = {}
        for i, (path, _) in enumerate(loaded):
            name, known = Path(path).stem, {*taken, *self.names}
            if name in known:  # by its number, unless that is a name as well
                name = f"{name}-{i}"
            if name not in known:
                self.names[name] = i

    def chosen(self, model: str | None, wanted: Sequence[LoraScale] | None) -> tuple[float, ...] | None:
        """Return the scales of a request, None for those of the load.

        Args:
            model: its name of the model, which may be that of an adapter: this one alone then.
            wanted: its own scales.

        Raises:
            ApiError: there is no such adapter.
        """
        if wanted is not None:
            return self._scales(wanted)
        if model in self.names:
            return tuple((scale or 1.0) * (i == self.names[model]) for i, scale in enumerate(self._loaded))
        return None

    def _scales(self, wanted: Sequence[LoraScale]) -> tuple[float, ...]:
        scales = [0.0] * len(self._loaded)
        for one in wanted:
            if one.id >= len(scales):
                raise bad_request(
                    f"There is no LoRA adapter {one.id}: this model was started with {len(scales)}.",
                    param="lora",
                    code="no_such_adapter",
                )
            scales[one.id] = one.scale
        return tuple(scales)
