"""Render the memory of a run for people: a table, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coupler.config.schema import Offload
from coupler.engine_kit.memory_plan import GIB, Kind, Phase, Term, total
from coupler.interfaces import Part
from coupler.run.memory_plan import ROOM, Device, MemoryPlan, Row

MOST = 6
"""Terms that are named of the phase that needs most."""
COPIED = 45e9
"""Bytes a second between a GPU and its host, as measured (docs/measurements.md)."""
LEAST = 0.01
"""Share of a phase below which a term is not named."""
ON_TOP = (
    "half a GiB to one for CUDA in each process, NCCL's buffers, and what the allocator "
    "cannot use in pieces"
)


def render(plan: MemoryPlan) -> str:
    """Return the table of each device, its largest terms, and whether it fits."""
    where = "GPU" if plan.gpu else "the CPU, where dtype=auto is fp32 (--device-gib plans a GPU)"
    lines = [f"memory, GiB on one {where}" if plan.gpu else f"memory, GiB on {where}"]
    for device in plan.devices:
        lines += ["", *_table(device), "", *_largest(device), _verdict(device, plan)]

    lines += ["", *render_recomputed(plan)] if plan.recomputed else ()
    lines += [""] * plan.gpu
    lines += _away(plan) if plan.gpu else ()
    if plan.host_bytes:
        lines.append(f"host: {_gib(plan.host_bytes)} GiB, pinned, of all ranks together")
    if plan.gpu:
        lines.append(f"not counted: {ON_TOP}")
    return "\n".join([*lines, *(f"unknown: {text}" for text in plan.unknown)])


def render_recomputed(plan: MemoryPlan) -> Iterator[str]:
    """Say how many layers of each role compute their activations again, and why."""
    room = f"{_gib(int(ROOM * plan.device_bytes))} GiB, {ROOM:.0%} of the device"
    for role, found in plan.recomputed.items():
        some = f"{found.layers} of {found.every} layers"
        if found.layers < found.every:
            yield f"{role}: {some} recompute, the fewest whose training fits into {room}"
        elif not plan.gpu or not plan.device_bytes:
            yield f"{role}: {some} recompute, since the memory of a GPU is not known"
        elif any(plan.is_unknown(other) for other in plan.beside(role)):
            yield f"{role}: {some} recompute, since what is unknown may need the rest"
        else:
            yield f"{role}: {some} recompute, since fewer do not fit into {room}"


def _table(device: Device) -> Iterator[str]:
    names = [*device.roles, "together"]
    first = max(len(label) for label in (*Phase, "each at its peak"))
    widths = [max(len(name), 6) for name in names]

    def line(label: str, cells: list[str]) -> str:
        both = zip(cells, widths, strict=True)
        return f"{label:{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in both)

    yield line("", names)
    for row in _in_order(device.rows):
        sizes = [total(row.terms[role]) for role in device.roles]
        yield line(row.phase, [_gib(size) for size in (*sizes, row.together)])
    if device.apart:
        peaks = [device.peak(role) for role in device.roles]
        yield line("each at its peak", [_gib(size) for size in (*peaks, sum(peaks))])


def _away(plan: MemoryPlan) -> Iterator[str]:
    """Say what leaves devices, and what that costs."""
    if plan.offload is Offload.FALSE:
        yield "nothing leaves its device"

    for device in plan.devices:
        every = frozenset[tuple[str, Kind]]().union(*(row.active for row in device.turns))
        for row in _in_order(device.turns) if plan.offload is not Offload.FALSE else ():
            gone = sorted(f"{role}'s {kind}" for role, kind in every - row.active - row.stays)
            shared = sum(other.phase is row.phase for other in device.turns) > 1
            engines = {role for role, kind in row.active if isinstance(kind, Part)}
            who = f" of {', '.join(sorted(engines))}" if shared else ""
            yield f"away in {row.phase}{who}: {', '.join(gone) or 'nothing'}"

    if plan.moved_bytes:
        seconds = 2 * plan.moved_bytes / COPIED
        yield (
            f"copies: {_gib(plan.moved_bytes)} GiB out and back in a step, about {seconds:.1f} s "
            f"at {COPIED / 1e9:g} GB/s"
        )


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """Return rows in the order of a step."""
    return sorted(rows, key=lambda row: [*Phase].index(row.phase))


def _largest(device: Device) -> Iterator[str]:
    row = max(device.rows, key=lambda row: row.together)
    yield f"largest: {row.phase}, {_gib(row.together)} GiB"
    for role, term in _terms(row)[:MOST]:
        by = f"  (lower: {term.lower})" if term.lower else ""
        yield f"  {_gib(term.size):>6}  {role}: {term.what}{by}"


def _terms(row: Row) -> list[tuple[str, Term]]:
    found = [(role, term) for role, terms in row.terms.items() for term in terms]
    kept = [pair for pair in found if pair[1].size >= LEAST * row.together]
    return sorted(kept, key=lambda pair: -pair[1].size)


def _verdict(device: Device, plan: MemoryPlan) -> str:
    most, there = device.most, plan.device_bytes
    if not there:
        return f"device: at least {_gib(most)} GiB; --device-gib N compares it with one"
    if most > there:
        return f"device: does not fit, {_gib(most)} GiB of {_gib(there)}"
    fits = "fits but for what is unknown" if plan.unknown else "fits"
    return f"device: {fits}, {_gib(most)} GiB of {_gib(there)}, {_gib(there - most)} left"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 or not size else f"{size / GIB:.3f}"
