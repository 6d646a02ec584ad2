"""Checks at start that the opened models can answer the requests of every arm."""

from __future__ import annotations

import time

from recserve.experiments.serving.arm_fields import ArmFields
from recserve.experiments.serving.registry import Experiments
from recserve.schemas.experiments import Use
from recserve.schemas.items import Candidate, RankRequest, RecommendRequest
from recserve.schemas.text import CompletionRequest
from recserve.service import Service
from recserve.service.errors import UnknownModel
from recserve.service.text.prompts import speculation


def check_arms(service: Service, experiments: Experiments) -> None:
    """Starts a request of every arm that needs no model, so that its fields are checked.

    Arms with another server are left out: their fields are for the models of that server.

    Args:
        service: The open service.
        experiments: Experiments of the server.

    Raises:
        ValueError: If an arm does not fit the models, or a goal is no event type of the server; the
            message names the experiment.
    """
    for one in experiments:
        for goal in one.settings.goal_types:
            try:
                service.histories.types.number(goal)
            except ValueError as error:
                raise ValueError(f"experiment {one.settings.name}, goals: {error}") from None
        for arm in (arm for arm in one.arms if not arm.remote):
            try:
                _probe(service, one.settings.use, arm.fields)
            except (ValueError, UnknownModel) as error:
                name = one.settings.name
                raise ValueError(f"experiment {name}, arm {arm.name}: {error}") from None


def _probe(service: Service, use: Use, fields: ArmFields) -> None:
    """Begins a request without a history; it does not reach the engine."""
    deadline_s = time.monotonic() + 60.0
    if use == "recommend":
        slate = fields.applied(RecommendRequest(history=[], k=1))
        service.recommender.begin(slate, "probe", deadline_s)
    elif use == "rank":
        unknown = [Candidate(item_id="\x00no such item")]
        ranking = fields.applied(RankRequest(history=[], candidates=unknown))
        service.ranker.begin(ranking, "probe", deadline_s)
    else:
        text = fields.applied(CompletionRequest(prompt="x", temperature=0.0))
        speculation(text.speculation, text.temperature, service.text.model)
