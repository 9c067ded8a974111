"""``engine=fsdp`` under several names, each with one fault in its plan of memory.

``CAUGHT_BY`` says which test of the kit must fail on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, make_dataclass, replace
from functools import wraps
from typing import Any

from coupler import Backend, hookimpl
from coupler.engine_kit.memory_plan import Asked, Needs, Phase, Term
from coupler.interfaces import Part
from coupler_engine_fsdp import plugin as fsdp
from coupler_engine_fsdp.config import FSDPConfig

HOLDS = "test_what_stays_between_steps_is_planned"
TAKES = "test_what_a_step_takes_is_planned"
GROWS = "test_more_tokens_never_plan_less"

# Makes a faulty plan from the configuration and what is asked.
Fault = Callable[[FSDPConfig, Asked], Needs]
FAULTS: dict[str, Fault] = {}
CAUGHT_BY: dict[str, str] = {}
HONEST = {
    "Honest": lambda config, asked: FSDPConfig.memory_needs(config, asked),
    "KnowsAPart": lambda config, asked: replace(
        FSDPConfig.memory_needs(config, asked), unknown=("its kernels' workspace",)
    ),
}


def fault(test: str) -> Callable[[Fault], Fault]:
    """Declare a fault: its backend is named after the function."""

    def declare(plan: Fault) -> Fault:
        FAULTS[plan.__name__], CAUGHT_BY[plan.__name__] = plan, test
        return plan

    return declare


def misread(test: str) -> Callable[[Callable[[Needs], Needs]], Any]:
    """Declare a fault that changes the right plan."""

    def declare(change: Callable[[Needs], Needs]) -> Any:
        @wraps(change)
        def plan(config: FSDPConfig, asked: Asked) -> Needs:
            return change(FSDPConfig.memory_needs(config, asked))

        return fault(test)(plan)

    return declare


def scaled(parts: Mapping[Any, tuple[Term, ...]], by: float) -> dict[Any, tuple[Term, ...]]:
    return {
        part: tuple(replace(term, size=int(by * term.size)) for term in terms)
        for part, terms in parts.items()
    }


@misread(HOLDS)
def half_of_what_stays(needs: Needs) -> Needs:
    return replace(needs, held=scaled(needs.held, 0.5))


@misread(HOLDS)
def no_moments(needs: Needs) -> Needs:
    held = {part: terms for part, terms in needs.held.items() if part is not Part.OPTIMIZER}
    return replace(needs, held=held)


@misread(HOLDS)
def weights_in_bf16(needs: Needs) -> Needs:
    halved = scaled({Part.PARAMS: needs.held[Part.PARAMS]}, 0.5)
    return replace(needs, held={**needs.held, **halved})


@misread(HOLDS)
def gradients_that_stay(needs: Needs) -> Needs:
    return replace(needs, held={**needs.held, Part.GRADS: needs.held[Part.PARAMS]})


@misread(TAKES)
def half_of_a_step(needs: Needs) -> Needs:
    return replace(needs, peaks=scaled(needs.peaks, 0.5))


@misread(TAKES)
def twice_a_step(needs: Needs) -> Needs:
    return replace(needs, peaks=scaled(needs.peaks, 2))


@misread(TAKES)
def no_step(needs: Needs) -> Needs:
    peaks = {phase: terms for phase, terms in needs.peaks.items() if phase != Phase.TRAINING}
    return replace(needs, peaks=peaks)


@fault(TAKES)
def one_micro_batch_of_a_step(config: FSDPConfig, asked: Asked) -> Needs:
    return FSDPConfig.memory_needs(replace(config, max_tokens_per_gpu=1024), asked)


@fault(GROWS)
def nothing_for_tokens(config: FSDPConfig, asked: Asked) -> Needs:
    return FSDPConfig.memory_needs(config, replace(asked, tokens=256))


@fault(GROWS)
def less_for_more_tokens(config: FSDPConfig, asked: Asked) -> Needs:
    tokens = 2**20 // asked.micro_batch(config.max_tokens_per_gpu)
    return FSDPConfig.memory_needs(
        replace(config, max_tokens_per_gpu=tokens), replace(asked, tokens=tokens)
    )


def _config(name: str, plan: Fault) -> type:
    config = make_dataclass(
        f"{name}_config",
        [("name", str, field(default=name))],
        bases=(FSDPConfig,),
        namespace={"memory_needs": plan},
    )
    config.__module__ = __name__
    return config


CONFIGS = {name: _config(name, plan) for name, plan in {**HONEST, **FAULTS}.items()}
# The processes of ranks find them by their names.
globals().update({config.__name__: config for config in CONFIGS.values()})


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    like = next(backend for backend in fsdp.coupler_backends() if backend.name == "fsdp")
    for name, config in CONFIGS.items():
        yield replace(like, name=name, config=config)
