"""Tuning before the weights are there (``load_format=dummy``): what is not tried with random ones, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autotune.errors import InputError
from autotune.spec import StudySpec

NOTE = (
    "random weights (load_format=dummy): answers were forced to assumed lengths; speed counts, text does not, and "
    "what depends on the weights (speculative decoding, routing of experts) was not tried"
)
SPECULATION = "random weights accept no draft, so speculative decoding can only lose"
ROUTING = "random weights send tokens to experts as no real ones do, so their balance means nothing"

_BOUND = {
    "speculative_": SPECULATION,
    "spec_": SPECULATION,
    "num_speculative_tokens": SPECULATION,
    "enable_expert_parallel": ROUTING,
    "enable_eplb": ROUTING,
    "eplb_": ROUTING,
    "num_redundant_experts": ROUTING,
    "expert_placement_strategy": ROUTING,
    "enable_elastic_ep": ROUTING,
}
"""Beginnings of flags whose effect depends on the weights (vLLM 0.8 to 0.33, short forms and parts included)."""


def random_weights(fixed: Mapping[str, object]) -> bool:
    """Whether these flags load no real weights."""
    return fixed.get("load_format") == "dummy"


def check_study(spec: StudySpec) -> None:
    """No flag of a study with random weights may depend on the weights.

    Raises:
        InputError: one does; names it and the reason.
    """
    given = [spec.fixed, spec.space, *(baseline.flags for baseline in spec.baselines)]
    check(spec.fixed, [name for flags in given for name in flags])


def check(fixed: Mapping[str, object], flags: Iterable[str]) -> None:
    """The same for a server: ``flags`` are all that it gets, by name.

    Raises:
        InputError: one depends on the weights.
    """
    if not random_weights(fixed):
        return
    for name in flags:
        reason = next((reason for begin, reason in _BOUND.items() if name.startswith(begin)), None)
        if reason is not None:
            raise InputError(
                f"{name} is not tried with load_format=dummy: {reason}",
                hint="leave it out here, and try it once the weights are there",
            )
