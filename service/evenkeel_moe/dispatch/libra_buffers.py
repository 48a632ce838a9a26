"""Libra's two prefetch buffers: one layer computes from one while the next arrives in the other.

Source: Libra, section 4.
"""

from evenkeel_moe.errors import InvalidInput


class PrefetchBuffers:
    """Tracks the transient experts in the places of the even and the odd buffer.

    The experts of a layer arrive while the previous layer computes from the other buffer. They are
    never part of a placement and never the source of a copy: the next layer of the same parity
    replaces them.
    """

    def __init__(self, size: int) -> None:
        """Create two empty buffers of `size` = N places each.

        Raises:
            InvalidInput: the size is negative.
        """
        if size < 0:
            raise InvalidInput(f"buffer size is {size}, must not be negative")
        self.size = size
        self._held: list[tuple[int, tuple[int, ...]] | None] = [None, None]
        self._computing: int | None = None

    def prefetch(self, layer: int, experts: tuple[int, ...]) -> int:
        """Reserve the buffer of a layer for its experts; returns 0 (even) or 1 (odd).

        Raises:
            InvalidInput: there are more experts than places, or a layer is computing from the
                buffer.
        """
        if len(experts) > self.size:
            raise InvalidInput(f"{len(experts)} experts for {self.size} places")
        if self._computing is not None and self._computing % 2 == layer % 2:
            raise InvalidInput(
                f"layer {layer} would overwrite the experts of layer {self._computing}"
            )
        self._held[layer % 2] = (layer, tuple(experts))
        return layer % 2

    def begin(self, layer: int) -> tuple[int, ...]:
        """Start a layer, which keeps its buffer until `end`; returns its experts in place order."""
        self._computing = layer
        held = self._held[layer % 2]
        return held[1] if held is not None and held[0] == layer else ()

    def end(self, layer: int) -> None:
        """End a layer and clear its buffer."""
        self._computing = None
        self._held[layer % 2] = None
