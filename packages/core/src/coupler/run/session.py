"""Lead one start of a run through its folder, from its checkpoint to its export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from coupler.config.compose import Composed, dump_yaml
from coupler.config.options import SECTIONS, section
from coupler.config.schema import RunConfig
from coupler.errors import DataError
from coupler.loop.engine_group import EngineGroup
from coupler.plugins.manager import Plugins
from coupler.rewards import Scoring, make_scoring
from coupler.rewards.options import opinions_of
from coupler.run import resume
from coupler.run.checkpoint import Checkpoint, Checkpoints
from coupler.run.closing import closing
from coupler.run.manifest import RESOLVED, RUN, STATE
from coupler.run.model_card import model_card
from coupler.run.plan import Plan
from coupler.run.provenance import installed
from coupler.run.run_folder import Journal, find_run
from coupler.run.saving import Resumable, export_folder, export_problem
from coupler.run.user_files import FILES, hash_user_files
from coupler.system.files import reading, remove, writing
from coupler.system.imports import file_of
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)


class Session:
    """Leads one start of a run in its folder.

    Args:
        config: the configuration of ``composed``, tracked. Options that are read here
            count as used.
        close: ends the workers of the run. It is called when the folder is closed.
    """

    def __init__(
        self, composed: Composed, config: RunConfig, plugins: Plugins, close: Callable[[], None]
    ) -> None:
        self.composed, self.config, self.plugins, self.close = composed, config, plugins, close
        self.resolved = dump_yaml(composed.config)
        self.run = uuid4().hex

    def previous(self) -> Checkpoint | None:
        """Return the checkpoint that this run goes on from.

        Raises:
            ConfigError: ``run_dir`` holds another run, or nothing whole.
        """
        run = find_run(Path(self.config.run_dir))
        self.run = run or self.run
        return resume.find(self.config, self.resolved, run)

    def is_complete(self, done: int) -> bool:
        """Tell whether ``done`` steps are all of the run, with their export written."""
        exported = not self.config.checkpoint.export
        if not exported and done >= self.config.steps:
            folder = export_folder(self.config.run_dir, "policy")
            problem = export_problem(folder)
            exported = not problem
            if problem and folder.exists():
                log.warning(f"{folder} is written again: {problem}")
        if complete := done >= self.config.steps and exported:
            log.info(f"{self.config.run_dir} is complete at step {done}; there is nothing to train")
        return complete

    def facts(self, data: str) -> dict[str, str]:
        """Return what tells this run from another one in its folder.

        Args:
            data: the fingerprint of its rows.
        """
        return {"data": data, "config": resume.config_hash(self.resolved), RUN: self.run}

    def code(self) -> dict[str, Path]:
        """Return a file of each part of the run beside core, by its option."""
        # Looking at an option here is no use of it.
        config = self.composed.config

        targets = {key: one.target for key, one in config.reward.named.items()}
        for path, kind in SECTIONS.items():
            if inner := section(config, path):
                targets[path] = self.plugins.get(kind, inner.name).target

        files = {name: file for name, target in targets.items() if (file := file_of(target))}
        given = [Path(origin) for origin in self.composed.origin.values() if Path(origin).is_file()]
        return {**files, "--config": given[0]} if given else files

    @contextmanager
    def recording(
        self, data: str, found: Checkpoint | None = None, plan: Plan | None = None
    ) -> Iterator[Journal]:
        """Open the run's folder and trackers for as long as the job runs.

        The workers of the run end with them.
        """
        facts: dict[str, Any] = self.facts(data)
        if plan:
            facts["plan"] = plan.plain()
        done = found.step if found else 0

        try:
            with Journal(
                self.config, self.resolved, self.plugins, facts, self.code(), done
            ) as journal:
                yield journal
        finally:
            self.close()

    @contextmanager
    def scoring(self) -> Iterator[Scoring]:
        """Hold the reward processes, which import the rewards while the job reads its
        rows and imports its backends. Whoever opens the run's folder waits for them.
        """
        said = opinions_of(self.config.reward_model, self.config.judge)
        pool = make_scoring(self.config.reward, said)

        try:
            pool.begin()
            yield pool
        finally:
            pool.close()

    def checkpoints(self, data: str) -> Checkpoints:
        """Return the checkpoints of this run.

        Args:
            data: the fingerprint of its rows.
        """
        facts = {
            **self.facts(data),
            "packages": installed(),
            RESOLVED: self.resolved,
            FILES: hash_user_files(self.resolved),
        }
        return Checkpoints(Path(self.config.run_dir) / "checkpoints", self.config.checkpoint, facts)

    async def restore(
        self,
        found: Checkpoint,
        roles: Mapping[str, EngineGroup],
        trainer: Resumable,
        data: str,
        hold: Callable[[str], AbstractAsyncContextManager[Any]],
    ) -> None:
        """Bring engines and trainer to where ``found`` was made.

        A checkpoint of another configuration brings the engines alone.

        Args:
            data: the fingerprint of the rows.
            hold: all of a role is on its device within this context.

        Raises:
            DataError: the checkpoint was made with other rows.
        """
        reset = self.config.checkpoint.reset_data
        if found.manifest.get("data") != data and not reset:
            raise DataError(
                f"the data is not what {found.folder} was made with.\n"
                "  try:  the same data, or checkpoint.reset_data=true to start it from the "
                "beginning"
            )
        contents = found.contents & {*self.config.checkpoint.load_contents}
        if "optimizer" not in contents:
            how = "is read without its" if "optimizer" in found.contents else "holds no"
            log.info(
                f"{found.folder} {how} optimizer: its moments and the learning rate's "
                "schedule start anew"
            )

        held = {role: group for role, group in roles.items() if role in found.manifest["roles"]}
        for role, group in held.items():
            async with hold(role):
                await found.restore(role, group, contents)
        same = found.manifest.get("config") == self.facts(data)["config"]
        if same and "extra" in contents:
            state = found.state
            with reading(found.folder / STATE):
                trainer.restore(state, reset_data=reset)
            return

        # The trainer's counts and samples are in the units of the other configuration.
        trainer.start_at(found.step)
        anew = ", ".join(["prompts", *(role for role in roles if role not in held)])
        why = "is read without extra" if same else "is of another configuration"
        log.info(f"{found.folder} {why}: {', '.join(held)} as it was there; {anew} start anew")

    async def export(self, group: EngineGroup, step: int | None = None) -> None:
        """Write the model in Hugging Face layout, to ``export`` or ``export_critic``.

        The folder appears when it is whole.

        Args:
            step: the steps that it was trained for. None is all of them.
        """
        folder = export_folder(self.config.run_dir, group.spec.role)
        card = model_card(
            self.composed.config,
            self.plugins,
            Path(self.config.run_dir),
            group.spec,
            step,
        )

        await export_whole(
            group,
            folder,
            Path(group.spec.model.path),
            card,
        )

    def conclude(self) -> None:
        """Say what came of the run, and what to type next."""
        if told := closing(self.composed.config, self.plugins):
            log.info(told, extra=PLAIN)


async def export_whole(group: EngineGroup, folder: Path, source: Path, card: str) -> None:
    """Export beside ``folder`` and rename, so that the folder is whole or absent.

    Args:
        card: the text of its README.md.
    """
    part = folder.with_name(f"{folder.name}.part")
    with writing(f"the export {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove(part)

    await group.export(part, source)

    with writing(f"the export {folder}"):
        (part / "README.md").write_text(card, encoding="utf-8")
        remove(folder)
        part.rename(folder)
