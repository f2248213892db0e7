"""Which part of a model each pipeline stage holds: pure arithmetic, the same on every rank.

A *chunk* is a part of the model that one rank runs without a send in between; each rank has ``vpp`` chunks. Chunk c of
rank r is number ``c * pp + r`` of the model (interleaved schedule, arXiv 2104.04473 section 2.2). If the layers do not
divide evenly, embedding and head count as a layer each, and may even have a chunk for themselves.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stages:
    """``chunks[i]``: the layers of the model's i-th chunk. The first also has the embedding, the last the head."""

    pp: int
    vpp: int
    chunks: tuple[range, ...]

    def owner(self, layer: int) -> tuple[int, int]:
        """Pipeline rank and chunk number of a layer."""
        index = next(i for i, chunk in enumerate(self.chunks) if layer in chunk)
        return index % self.pp, index // self.pp

    @property
    def layout(self) -> list[list[str]]:
        """The chunks as megatron-core's ``pipeline_model_parallel_layout``."""
        names = [["decoder"] * len(chunk) for chunk in self.chunks]
        names[0].insert(0, "embedding")
        names[-1].append("loss")
        return names


def stages(*, layers: int, pp: int, vpp: int) -> Stages:
    """Distribute layers over pp x vpp chunks: evenly if they divide; else embedding and head count as a layer each."""
    count = pp * vpp
    if layers % count == 0:
        sizes = [layers // count] * count
    else:
        assert layers + 2 >= count, "Layout.validate lets nothing else through"
        each, more = divmod(layers + 2, count)
        sizes = [each + (1 <= position <= more) for position in range(count)]  # remaining layers go to the middle
        sizes[0] -= 1
        sizes[-1] -= 1
    starts = [sum(sizes[:i]) for i in range(count)]
    return Stages(pp=pp, vpp=vpp, chunks=tuple(range(s, s + n) for s, n in zip(starts, sizes, strict=True)))
