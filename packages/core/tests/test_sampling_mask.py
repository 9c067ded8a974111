"""Sampling masks: the ids that a token was sampled among get from the rollout to every
pass of the policy, so that both sides mean the same distribution.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_run import ToyRun

from coupler.batch import Batch
from coupler.batch.batch import concat
from coupler.batch.columns import loss_columns
from coupler.config.schema import RunConfig, SamplingConfig
from coupler.conversation.packing import Sample, pack
from coupler.conversation.tree import Row as OnePath
from coupler.data import Prompt, Row
from coupler.errors import CouplerError, WeightSyncError
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Completion, Model, Rank, Request
from coupler.loop.rollout_group import RolloutGroup
from coupler.testing.models import write_toy
from coupler.testing.toy import ToyAlgorithm, ToyEngine, ToyRollout
from coupler.testing.toy_config import ToyRolloutConfig
from coupler.worker.replica import RolloutSpec

TOP_K = 12
WHOLE = SamplingConfig(max_tokens=8)
CUT = replace(WHOLE, top_p=0.9, top_k=TOP_K)
# widths of the masks that passes of the engine got, 0 for none
SEEN: list[int] = []


class Watched(ToyEngine):
    """Notes the masks of every pass."""

    def _outputs(self, batch: Batch, top_k: int = 0) -> dict[str, np.ndarray]:
        SEEN.append(batch["sampling_mask"].shape[1] if batch.has("sampling_mask") else 0)
        return super()._outputs(batch, top_k)


class Blind(ToyEngine):
    """Computes log-probs over all ids, whatever the masks say."""

    def _outputs(self, batch: Batch, top_k: int = 0) -> dict[str, np.ndarray]:
        return super()._outputs(batch.without("sampling_mask"), top_k)


class WantsOld(ToyAlgorithm):
    needs = frozenset({"old_logprobs"})


def run(
    folder: Path, engine: str, sampling: SamplingConfig, steps: int = 1
) -> list[dict[str, float]]:
    config = RunConfig(
        steps=3,
        prompts_per_step=4,
        samples_per_prompt=4,
        optimizer_steps_per_batch=steps,
        sampling=sampling,
    )
    here = "test_sampling_mask:"
    return ToyRun(folder, config, engine=f"{here}{engine}", algorithm=f"{here}WantsOld").run()


def test_engine_and_rollout_mean_the_same_distribution(tmp_path: Path) -> None:
    """Their log-probs differ as little as without a cut. An engine that does not look
    at the masks ends the run.
    """
    masked = run(tmp_path / "masked", "Watched", CUT)
    whole = run(tmp_path / "whole", "Watched", WHOLE)
    for cut, all_ids in zip(masked[1:], whole[1:], strict=True):
        assert cut["train_infer/abs_diff_max"] < 1e-5 > all_ids["train_infer/abs_diff_max"]

    with pytest.raises(WeightSyncError, match="log-probs"):
        run(tmp_path / "blind", "Blind", CUT)


def test_every_pass_of_the_policy_gets_the_masks(tmp_path: Path) -> None:
    SEEN.clear()
    run(tmp_path, "Watched", CUT, steps=2)
    passes = [width for width in SEEN if width]
    assert passes == [TOP_K] * 9, "in 3 steps, old log-probs and two optimizer steps each"
    assert len(SEEN) > len(passes), "the proof of the first sync samples among all ids"


def packed(mask: np.ndarray | None, tokens: tuple[int, ...] = (7, 8)) -> Batch:
    prompt = Prompt(Row("", "", 0, {}), (5, 6, 7))
    size = len(tokens)
    done = Completion(tokens, (0.0,) * size, (0,) * size, "stop", sampling_mask=mask)
    return pack(
        [Sample(prompt, (OnePath.of_one_turn(prompt.ids, done),), 1.0, "", done.finish)], 0, 1, 1.0
    )


def test_a_row_is_about_predicting_its_token() -> None:
    batch = packed(np.array([[7, 9], [8, -1]]))
    assert batch["sampling_mask"].tolist() == [[-1, -1]] * 3 + [[7, 9], [8, -1]]
    assert "sampling_mask" not in loss_columns(batch), "only engines read it"
    assert not packed(None).has("sampling_mask")


def test_masks_of_several_widths_are_joined() -> None:
    wide, narrow = packed(np.array([[7, 9, 3], [8, 7, 2]])), packed(np.array([[7], [8]]))
    joined = Batch.concat([narrow, wide])["sampling_mask"]
    assert joined[3:5].tolist() == [[7, -1, -1], [8, -1, -1]]
    assert joined[-1].tolist() == [8, 7, 2]
    assert concat([np.array([1.5]), np.array([2.0])]).tolist() == [1.5, 2.0]


class CutOff(ToyRollout):
    """Aborts after two tokens, and returns wider masks then."""

    first = Request((5, 6, 7), 2, top_k=3)

    async def generate(self, request: Request) -> Completion:
        cut = request.prompt == self.first.prompt
        done = await super().generate(self.first if cut else request)
        wider = ((0, 0), (0, 2 if cut else 1))
        mask = np.pad(done.sampling_mask, wider, constant_values=-1)
        return replace(done, finish="abort" if cut else "length", sampling_mask=mask)


class CutOffAtOnce(ToyRollout):
    """Aborts before the first token, without a mask."""

    calls = 0

    async def generate(self, request: Request) -> Completion:
        self.calls += 1
        return (
            await super().generate(request) if self.calls > 1 else Completion((), (), (), "abort")
        )


class Silent(ToyRollout):
    """Returns no masks."""

    async def generate(self, request: Request) -> Completion:
        return replace(await super().generate(request), sampling_mask=None)


class Shifted(ToyRollout):
    """Returns other ids than it sampled among."""

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        return replace(done, sampling_mask=done.sampling_mask + 100)


def sampled(folder: Path, rollout: str) -> Completion:
    executor = Local(inline=True, waits=Waits(60.0, 60.0))
    model = Model(str(write_toy(folder / "model")))
    spec = RolloutSpec(f"test_sampling_mask:{rollout}", ToyRolloutConfig(), model)
    group = RolloutGroup(executor, spec, [Rank()])

    async def sample() -> Completion:
        await group.setup()
        return await group.generate(Request((5, 6, 7), 6, top_k=3))

    return asyncio.run(sample())


@pytest.mark.parametrize(("rollout", "width"), [("CutOff", 5), ("CutOffAtOnce", 3)])
def test_a_completion_that_was_cut_off_has_the_masks_of_all_parts(
    tmp_path: Path, rollout: str, width: int
) -> None:
    done = sampled(tmp_path, rollout)
    assert done.finish == "length" and done.sampling_mask.shape == (6, width)
    assert ((done.sampling_mask >= 0).sum(1) == 3).all()


@pytest.mark.parametrize("rollout", ["Silent", "Shifted"])
def test_a_mask_without_the_sampled_token_is_an_error(tmp_path: Path, rollout: str) -> None:
    with pytest.raises(CouplerError, match="the token is not always one of them") as error:
        sampled(tmp_path, rollout)
    assert "sampling.top_k=0" in str(error.value)
