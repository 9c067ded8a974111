"""Check engines that say what memory they will need: ``coupler plan --memory`` must
foresee what training then takes of PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coupler.engine_kit.json_files import read_json
from coupler.engine_kit.memory_plan import Asked, Needs, Phase, PlansMemory, total
from coupler.interfaces import Model
from coupler.testing import expect
from coupler.testing.memory import LENGTH, TOKENS, measured_batch, on_gpu
from coupler.testing.models import VOCAB, write_qwen2, write_qwen3_moe
from coupler.testing.ranks import World
from coupler.testing.reference import Reference
from coupler.testing.subject import Subject

# A plan may differ by this share of what is measured, and by these bytes of tables,
# such as those of rotary embeddings. They weigh in the kit's models alone.
SHARE, TABLES = 0.15, 32 << 10
# The plan of a step may be above by this share, since a compiler may take less
# than single operations.
MORE = 0.3
# Libraries hold workspaces of some 32 MiB on a GPU. A model this wide makes them small.
WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
LOSS = "coupler.testing.memory:surprise"
# Activations of a step so small are next to nothing.
SMALL_STEP = measured_batch(tokens=64, length=16, vocab=VOCAB)
LARGE_STEP = measured_batch(vocab=VOCAB)


@pytest.fixture(autouse=True)
def plans(engine_subject: Subject) -> None:
    """Skip an engine that does not plan its memory."""
    if not isinstance(engine_subject.config(), PlansMemory):
        pytest.skip(f"{engine_subject} does not say what memory it needs")
    if not find_spec("torch"):
        pytest.skip("PyTorch is not installed, and the kit measures its allocations")


@pytest.fixture
def folder(reference: Reference, engine_subject: Subject, model_name: str, tmp_path: Path) -> Path:
    """Return the kit's model, and on a GPU a wide one of the same kind."""
    if engine_subject.toy or not on_gpu():
        return reference.folder
    if model_name == "moe":
        return write_qwen3_moe(tmp_path / "wide", **WIDE)
    return write_qwen2(tmp_path / "wide", tied=model_name == "tied", **WIDE)


def planned(subject: Subject, folder: Path, tokens: int = TOKENS, limit: int = TOKENS) -> Needs:
    """Return what the engine plans for steps of so many tokens on each shard, in
    micro-batches of ``limit``. Skip the test where the plan knows a part only.
    """
    config = subject.config(max_tokens_per_gpu=limit, ranks=subject.ranks_for(1))
    needs = config.memory_needs(
        Asked(
            path="engine",
            model=Model(str(folder)),
            shape=read_json(folder / "config.json"),
            trains=True,
            gpu=on_gpu(),
            longest=LENGTH,
            tokens=tokens,
        )
    )

    if needs.unknown:
        pytest.skip(f"{subject} plans a part of its memory: {'; '.join(needs.unknown)}")
    expect.holds(Phase.TRAINING in needs.peaks, "a plan of a step of training", sorted(needs.peaks))
    return needs


def held(needs: Needs) -> int:
    """Return the bytes that stay. On the CPU those in host memory are beside them."""
    return sum(map(total, needs.held.values())) + (0 if on_gpu() else needs.host)


def is_foreseen(planned_bytes: int, measured: int, what: str, more: float = SHARE) -> None:
    """Fail where a plan is too low, or above by more than the share ``more``."""
    if not measured:
        pytest.skip(f"PyTorch allocates nothing of {what}, and the kit measures no other memory")
    low, high = ((1 - SHARE) * measured - TABLES, (1 + more) * measured + TABLES)
    assert low <= planned_bytes <= high, (
        f"expected a plan of {what} from {int(low):,} to {int(high):,} bytes, since {measured:,} "
        f"were measured, came {planned_bytes:,}"
    )


def test_what_stays_between_steps_is_planned(
    fresh: Callable[..., World], engine_subject: Subject, folder: Path, every_model: None
) -> None:
    """It is the weights and the optimizer's state, once a step was taken."""
    needs = planned(engine_subject, folder)
    world = fresh(folder, apart=True, max_tokens_per_gpu=TOKENS)
    _, measured = world.memory([SMALL_STEP] * world.layout.num_shards, LOSS)
    parts = {str(part): total(terms) for part, terms in needs.held.items()}
    is_foreseen(held(needs), measured, f"what an engine holds ({parts})")


@pytest.mark.parametrize("limit", [TOKENS, TOKENS // 4])
def test_what_a_step_takes_is_planned(
    fresh: Callable[..., World],
    engine_subject: Subject,
    folder: Path,
    every_model: None,
    limit: int,
) -> None:
    """It is the peak above what stays, with one micro-batch and with several."""
    if engine_subject.ranks_for(1) > 1 and not on_gpu():
        pytest.skip("on the CPU the threads of collectives hold copies, which no plan has")
    peak = planned(engine_subject, folder, limit=limit).peaks[Phase.TRAINING]

    world = fresh(folder, apart=True, max_tokens_per_gpu=limit)
    num_shards = world.layout.num_shards
    world.memory([SMALL_STEP] * num_shards, LOSS)  # It makes the optimizer's state.
    measured, _ = world.memory([LARGE_STEP] * num_shards, LOSS)

    terms = {term.what: term.size for term in peak}
    is_foreseen(total(peak), measured, f"a step on top of what stays ({terms})", MORE)


@pytest.mark.parametrize("what", ["the step", "the micro-batch"])
def test_more_tokens_never_plan_less(engine_subject: Subject, folder: Path, what: str) -> None:
    """Tokens are of the whole step, or of a micro-batch of a step of many."""
    most = 64 * TOKENS
    sizes = [LENGTH << doubled for doubled in range(8)]
    found = []
    for tokens in sizes:
        facts = {"tokens": tokens, "limit": most} if what == "the step" else {"limit": tokens}
        needs = planned(engine_subject, folder, **{"tokens": most, **facts})
        found.append(held(needs) + total(needs.peaks[Phase.TRAINING]))

    expect.same(found, sorted(found), f"the plans of {sizes} tokens in {what}")
    expect.above(found[-1], found[0], f"the plan of {sizes[-1]} tokens in {what}")
