"""Experiments of a server: the arm of each request, the modes, the checks and the metrics.

Only a server with experiments imports this file. The state of its application then has `Arms`, and
each recommend, rank and text request of a user goes through it:

1. The registry draws experiment and arm by the user's id, or leaves the request alone.
2. The mode decides which arms answer (`_ItemRequest`; texts have the mode `split` only).
3. Each result is recorded for its arm, where a guard may end the experiment.
4. The response, its header and its token name the arm, or say why no arm answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from recserve.config import ConfigError, ServerConfig
from recserve.core.errors import DeadlineExceeded
from recserve.experiments.experiment import (
    Experiment,
    ForwardingError,
    ServingArm,
)
from recserve.experiments.registry import Draw, Experiments
from recserve.experiments.saved_counts import SavedCounts
from recserve.experiments.settings import ArmFields, GuardSettings, parse_experiments
from recserve.experiments.shared_state import Exchanger
from recserve.experiments.tallies import FORWARDINGS, NUM_SLICES, ArmResult, Comparison, slice_ms
from recserve.experiments.team_draft import team_draft
from recserve.extras import install_advice
from recserve.features.history.stores import split_ttl
from recserve.features.state_files import EXPERIMENTS, default_experiments
from recserve.files import UnreadableFile
from recserve.schemas.experiments import ExperimentLabel, Use
from recserve.schemas.items import (
    Candidate,
    InvalidRequest,
    RankRequest,
    RankResponse,
    RecommendRequest,
    RecommendResponse,
)
from recserve.schemas.text import CompletionRequest, TextRequest
from recserve.server.context import BeginTexts, RequestContext
from recserve.server.errors import ClientGone, row_of
from recserve.server.routes.completions import write_texts
from recserve.service import Service
from recserve.service.errors import UnknownModel
from recserve.service.pending import ItemService
from recserve.service.recommend import DEADLINE_PASSED
from recserve.service.snapshot import LISTS
from recserve.service.text.prompts import speculation

if TYPE_CHECKING:
    from recserve.features.shared_counts import SharedCounts
    from recserve.server.remote_arm import RemoteArm

B = TypeVar("B", bound=RecommendRequest | RankRequest)
A = TypeVar("A", bound=RecommendResponse | RankResponse)
T = TypeVar("T", bound=TextRequest)
log = logging.getLogger(__name__)
SHARED_TIMEOUT_S = 0.4  # of a reply of Redis about shared counts
MAX_COPIES = 8  # of mode `shadow` at the same time


class ArmNotApplicable(ValueError):
    """The fields of an arm do not fit a request. The client is not at fault."""


class Arms:
    """The arms of a server's experiments.

    Attributes:
        experiments: The experiments.
        remote: The arms that another server answers, by label.
        copies: Requests of mode `shadow` in progress.
        counts: Saves the experiments, or shares them with other servers.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Restores the counts and opens no connection yet.

        Args:
            config: Settings of the server, with experiments.

        Raises:
            InvalidRequest: If a setting of an experiment is out of range.
            ConfigError: If an arm has an address and the extra `client` is missing, its key cannot
                be read, or `experiments_dir` cannot be used.
        """
        settings = parse_experiments(config.experiments)
        self.experiments = Experiments(Experiment(one) for one in settings)
        remote = (arm for one in self.experiments for arm in one.arms if arm.remote)
        self.remote = {arm.label: _open_remote(arm) for arm in remote}
        self.copies: set[asyncio.Task[None]] = set()
        self.counts = _open_counts(config, self.experiments)

    def start(self) -> None:
        """Starts to save the counts."""
        self.counts.start()

    async def close(self) -> None:
        """Closes the connections to other servers and saves the last counts."""
        for arm in self.remote.values():
            await arm.close()
        await asyncio.to_thread(self.counts.close)

    def check(self, service: Service) -> None:
        """Starts a request of every arm that needs no model, so that its fields are checked.

        Arms with another server are left out: their fields are for the models of that server.

        Args:
            service: The open service.

        Raises:
            ValueError: If an arm does not fit the models, or a goal is no event type of the
                service; the message names the experiment.
        """
        for one in self.experiments:
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

    async def answer_items(
        self,
        context: RequestContext,
        part: ItemService[B, A],
        body: B,
        request_id: str,
        deadline_s: float,
    ) -> A:
        """Returns the answer of a recommend or rank request; arguments as in `context.ask`.

        Raises:
            Exception: What the request fails with; row_of maps it to an HTTP error.
        """
        user = None if body.user is None else body.user.id
        use: Use = "recommend" if isinstance(body, RecommendRequest) else "rank"
        draw = self.experiments.draw(use, user, request_id, body)
        if draw is None:
            return await context.ask(part, body, request_id, deadline_s)
        drawn = _ItemRequest(self, context, part, body, request_id, deadline_s)
        label = drawn.label(draw.label)
        try:
            answer = await drawn.answer(draw)
        except ArmNotApplicable as misfit:
            reason = f"the arm does not fit: {misfit}"
            label = drawn.label(msgspec.structs.replace(label, arm=None, reason=reason))
            answer = await drawn.ask(None, deadline_s)
        except ForwardingError as error:
            reason = f"the server of the arm failed: {error}"
            label = drawn.label(msgspec.structs.replace(label, arm=None, reason=reason))
            answer = await drawn.ask_control(draw.experiment)
            assert draw.arm is not None
            _record_refusal(draw.experiment, draw.arm, error)
        # The token of an answer that does not count names no arm, so its events do not count.
        arm = "" if label.reason is not None or label.arm is None else label.arm
        teams = _teams(answer, draw.experiment)
        shown = [each.name for each in draw.experiment.arms] if teams else [arm] * bool(arm)
        draw.experiment.count_answer(shown, request_id if user is None else user)
        token = context.service.signer.label(answer.attribution_token, label.name, arm, teams)
        return msgspec.structs.replace(answer, experiment=label, attribution_token=token)

    async def write_texts(self, context: RequestContext, begin: BeginTexts[T], body: T) -> Response:
        """Returns the response of a text request; arguments as in the plain function.

        Raises:
            Exception: What the request fails with.
        """
        trace = context.trace
        draw = self.experiments.draw("text", body.user, trace.request_id, body)
        if draw is None or draw.arm is None:
            trace.experiment = None if draw is None else draw.label
            return await write_texts(context, begin, body)
        experiment, arm, counted = draw.experiment, draw.arm, draw.counted
        trace.experiment, began_s = draw.label, time.monotonic()

        def record(error: BaseException | None, num_tokens: int) -> None:
            if counted and error is None:
                seconds = time.monotonic() - began_s
                experiment.record(arm, ArmResult(seconds, empty=not num_tokens))
            elif counted and error is not None:
                _record_error(experiment, arm, error)

        try:
            fitted = arm.fields.apply(body)
            return await write_texts(context, begin, fitted, record)
        except InvalidRequest as error:
            if not _is_misfit(error, arm):
                raise
            reason = f"the arm does not fit: {error}"
        trace.experiment = msgspec.structs.replace(draw.label, arm=None, reason=reason)
        return await write_texts(context, begin, body)


def _open_counts(config: ServerConfig, experiments: Experiments) -> SavedCounts | Exchanger:
    """Restores the experiments; without a folder that can be used they live in memory.

    Servers with one catalogue in Redis share them there.

    Raises:
        ConfigError: If `experiments_dir` or the URL of Redis cannot be used.
    """
    if config.catalog_url is not None:
        return _share(config, config.catalog_url, experiments)
    folder = config.experiments_dir
    if folder is None and config.bundles_dir is not None:
        folder = config.bundles_dir.resolve() / EXPERIMENTS
    if folder is None and config.bundle is not None:
        folder = default_experiments(config.bundle)
    try:
        return SavedCounts(folder, experiments)
    except UnreadableFile as error:
        raise ConfigError(f"experiments_dir: {error}") from None
    except OSError as error:
        message = f"experiments_dir: {folder} cannot be used: {error}"
        if config.experiments_dir is not None:
            raise ConfigError(message) from None
        log.warning("%s; the counts of experiments end with this process", message)
        return SavedCounts(None, experiments)


def _share(config: ServerConfig, url: str, experiments: Experiments) -> Exchanger:
    """Shares the experiments with the servers of a catalogue in Redis. Raises ConfigError."""
    if config.experiments_dir is not None:
        log.info(
            "experiments_dir: %s is not used, because servers with one catalogue have the counts "
            "of experiments in Redis",
            config.experiments_dir,
        )
    replicas = config.catalog_wait_replicas
    if replicas is None:  # a failover of Sentinel or Cluster happens by itself
        replicas = int("+" in url.partition("://")[0])
    writer = f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
    for one in experiments:
        one.share(open_board(split_ttl(url)[0], config.catalog_name, one, writer, replicas))
    return Exchanger(experiments)


def open_board(
    url: str, catalog: str, one: Experiment, writer: str, wait_replicas: int = 0
) -> SharedCounts:
    """Returns the counts of an experiment in Redis.

    Args:
        url: URL of Redis.
        catalog: Name of the log of item changes, whose servers have one experiment.
        one: The experiment.
        writer: Name of this process, which is new at each start.
        wait_replicas: Replicas of Redis that shall have a new state of the switch.

    Raises:
        ConfigError: If the URL is malformed, or no node of a cluster answers.
    """
    # Only servers that share their items need the package redis.
    from recserve.features.redis_connection import FAILURES, connect, describe
    from recserve.features.shared_counts import Layout, SharedCounts

    guard, counts = one.settings.guard or GuardSettings(), one.counts
    sizes = counts.values.size, counts.num_head, counts.num_window
    layout = Layout(*sizes, slice_ms(guard.window_s), NUM_SLICES)
    try:
        client = connect(url, timeout_s=SHARED_TIMEOUT_S)
    except FAILURES as error:
        raise ConfigError(f"catalog_log: {describe(error)}") from None
    except ValueError as error:
        raise ConfigError(f"catalog_log: {error}") from None
    name = f"{catalog}/{one.name}/{one.settings_hash()[:16]}"
    return SharedCounts(client, name, layout, writer, wait_replicas)


@dataclass(frozen=True)
class _ItemRequest(Generic[B, A]):
    """A recommend or rank request that is part of an experiment: one method per mode.

    Attributes:
        arms: The arms of the server.
        context: The request.
        part: The part of the service that answers.
        body: The decoded body, without the fields of an arm.
        request_id: Identifies the request.
        deadline_s: time.monotonic() value of the deadline.
    """

    arms: Arms
    context: RequestContext
    part: ItemService[B, A]
    body: B
    request_id: str
    deadline_s: float

    def label(self, label: ExperimentLabel) -> ExperimentLabel:
        """Returns the label of the answer. It is that of the response too, if that has no other."""
        if self.request_id == self.context.trace.request_id:
            self.context.trace.experiment = label
        return label

    async def answer(self, draw: Draw) -> A:
        """Returns the answer in the mode of the experiment.

        Raises:
            ArmNotApplicable: If the fields of the arm do not fit the request.
            ForwardingError: If the server of the arm has not answered.
            Exception: What the request fails with.
        """
        if draw.arm is None:
            return await self.ask(None, self.deadline_s)
        if not draw.counted:
            return await self.ask_fitting(draw.arm)
        match draw.experiment.settings.mode:
            case "paired":
                return await self.answer_paired(draw.experiment)
            case "shadow":
                return await self.answer_shadow(draw.experiment)
            case "interleaved":
                return await self.answer_interleaved(draw.experiment)
        return await self.ask_and_record(draw.experiment, draw.arm)

    async def answer_paired(self, experiment: Experiment) -> A:
        """Runs both arms, one after the other in drawn order. Returns the control's answer.

        A treatment that goes first gets half of the time that is left, so that the control still
        answers. An error of the treatment never reaches the client.
        """
        began_s = time.monotonic()
        half_s = began_s + (self.deadline_s - began_s) / 2
        if experiment.coin(self.request_id).random() < 0.5:
            answer = await self.ask_and_record(experiment, experiment.control)
            had_time = time.monotonic() < half_s
            other = await self.ask_second(experiment, self.deadline_s, had_time)
        else:
            other = await self.ask_second(experiment, half_s, had_time=False)
            answer = await self.ask_and_record(experiment, experiment.control)
        if isinstance(other, ForwardingError):
            _record_refusal(experiment, experiment.arms[1], other)
        elif other is not None:
            experiment.compare(_item_ids(answer), _item_ids(other))
        return answer

    async def ask_second(
        self, experiment: Experiment, deadline_s: float, had_time: bool
    ) -> A | ForwardingError | None:
        """Returns the answer of the second arm, or its refusal; None if it failed.

        Args:
            experiment: An experiment of mode `paired`.
            deadline_s: time.monotonic() value of the arm's own deadline.
            had_time: False if a missed deadline may be due to the pairing; it is then no error.
        """
        arm = experiment.arms[1]
        began_s = time.monotonic()
        try:
            answer = await self.ask(arm, deadline_s)
        except ClientGone:
            raise
        except Exception as error:
            if isinstance(error, ForwardingError) and error.result == "refused":
                return error
            if _is_late(error) and not had_time:
                experiment.drop()
            else:
                _record_error(experiment, arm, error)
            return None
        _record_answer(experiment, arm, began_s, answer)
        return answer

    async def answer_shadow(self, experiment: Experiment) -> A:
        """Returns the control's answer. A copy runs through the treatment in the background.

        The copy is dropped while requests wait for the engine, and while MAX_COPIES copies run.
        """
        answer = await self.ask_and_record(experiment, experiment.control)
        copies = self.arms.copies
        if self.context.service.engine.stats().queue_depth or len(copies) >= MAX_COPIES:
            experiment.drop()
            return answer
        task = asyncio.create_task(self.copy(experiment, _item_ids(answer)))
        copies.add(task)
        task.add_done_callback(copies.discard)
        return answer

    async def copy(self, experiment: Experiment, given: list[str]) -> None:
        """Runs the treatment and compares its items with the given ones. It raises no error."""
        arm = experiment.arms[1]
        began_s = time.monotonic()
        deadline_s = began_s + self.context.state.default_timeout_ms / 1e3
        try:
            if self.context.state.lifecycle.service is not self.context.service:
                return  # a replaced service keeps nothing of users in its caches
            body = arm.fields.apply(self.body)
            if arm.remote:
                answer = await self.forward(arm, body, deadline_s)
            else:  # the client has its answer and may have gone
                work = await self.context.submit(self.part, body, self.request_id, deadline_s)
                await asyncio.gather(*map(asyncio.wrap_future, work.futures))
                answer = work.wait()
        except Exception as error:
            _record_error(experiment, arm, error)
            _record_refusal(experiment, arm, error)
            return
        _record_answer(experiment, arm, began_s, answer)
        experiment.compare(given, _item_ids(answer))

    async def answer_interleaved(self, experiment: Experiment) -> A:
        """Returns one slate from those of both arms, each item marked with its arm.

        If the treatment fails, the control's slate is returned alone.
        """
        began_s = time.monotonic()

        async def ask(arm: ServingArm) -> A:
            try:
                answer = await self.ask(arm, self.deadline_of(arm))
            except Exception as error:
                _record_error(experiment, arm, error)
                raise
            _record_answer(experiment, arm, began_s, answer)
            return answer

        first, second = await asyncio.gather(*map(ask, experiment.arms), return_exceptions=True)
        if isinstance(first, BaseException):
            if _is_misfit(first, experiment.control):
                raise ArmNotApplicable(str(first)) from first
            raise first
        if isinstance(second, BaseException):
            _record_refusal(experiment, experiment.arms[1], second)
            return first
        experiment.compare(_item_ids(first), _item_ids(second))
        slates = cast(RecommendResponse, first), cast(RecommendResponse, second)
        return cast(A, _interleave(slates, experiment, self.request_id))

    async def ask(self, arm: ServingArm | None, deadline_s: float) -> A:
        """Returns the answer of an arm by a time.monotonic() value; None is the plain service."""
        body = self.body if arm is None else arm.fields.apply(self.body)
        if arm is not None and arm.remote:
            return await self.context.while_connected(self.forward(arm, body, deadline_s))
        return await self.context.ask(self.part, body, self.request_id, deadline_s)

    async def forward(self, arm: ServingArm, body: B, deadline_s: float) -> A:
        """Returns the answer of the arm's own server, with a token of this server."""
        experiment = self.arms.experiments.find(arm.experiment)
        sent = msgspec.structs.replace(body, request_id=self.request_id)
        try:
            answer: A = await self.arms.remote[arm.label].ask(sent, deadline_s)
        except ForwardingError as error:
            experiment.count_forwarding(arm, error.result)
            raise
        experiment.count_forwarding(arm, "answered")
        user = None if body.user is None else body.user.id
        versions = answer.model_version, answer.catalog_version
        signer, shown = self.context.service.signer, _item_ids(answer)
        token = signer.token(self.request_id, user, *versions, shown)
        return msgspec.structs.replace(answer, attribution_token=token)

    def deadline_of(self, arm: ServingArm) -> float:
        """Returns the deadline of an arm. Another server gets half of the time that is left."""
        if not arm.remote:
            return self.deadline_s
        now_s = time.monotonic()
        return now_s + (self.deadline_s - now_s) / 2

    async def ask_fitting(self, arm: ServingArm) -> A:
        """Returns an arm's answer. Raises ArmNotApplicable if its fields do not fit."""
        try:
            return await self.ask(arm, self.deadline_s)
        except InvalidRequest as error:
            if _is_misfit(error, arm):
                raise ArmNotApplicable(str(error)) from error
            raise

    async def ask_control(self, experiment: Experiment) -> A:
        """Returns the control's answer; that of the plain service if the control does not fit."""
        try:
            return await self.ask_fitting(experiment.control)
        except ArmNotApplicable:
            return await self.ask(None, self.deadline_s)

    async def ask_and_record(self, experiment: Experiment, arm: ServingArm) -> A:
        """Returns the answer of an arm and records its latency or failure.

        Raises:
            ArmNotApplicable: If a field that the arm sets is invalid for this request.
            Exception: What the request fails with.
        """
        began_s = time.monotonic()
        try:
            answer = await self.ask(arm, self.deadline_of(arm))
        except Exception as error:
            _record_error(experiment, arm, error)
            if _is_misfit(error, arm):
                raise ArmNotApplicable(str(error)) from error
            raise
        _record_answer(experiment, arm, began_s, answer)
        return answer


def _open_remote(arm: ServingArm) -> RemoteArm:
    try:
        from recserve.server.remote_arm import RemoteArm
    except ImportError:
        advice = install_advice("client")
        message = f"experiments: arm {arm.label} has a url, which needs httpx: {advice}"
        raise ConfigError(message) from None
    return RemoteArm(arm)


def _probe(service: Service, use: Use, fields: ArmFields) -> None:
    """Begins a request without a history; it does not reach the engine."""
    deadline_s = time.monotonic() + 60.0
    if use == "recommend":
        slate = fields.apply(RecommendRequest(history=[], k=fields.least_k))
        service.recommender.begin(slate, "probe", deadline_s)
    elif use == "rank":
        unknown = [Candidate(item_id="\x00no such item")]
        ranking = fields.apply(RankRequest(history=[], candidates=unknown))
        service.ranker.begin(ranking, "probe", deadline_s)
    else:
        text = fields.apply(CompletionRequest(prompt="x", temperature=0.0))
        speculation(text.speculation, text.temperature, service.text.model)


def _interleave(
    slates: tuple[RecommendResponse, RecommendResponse], experiment: Experiment, request_id: str
) -> RecommendResponse:
    """Returns both slates as one, in the envelope of the control's."""
    control, treatment = slates
    k = max(len(control.items), len(treatment.items))
    coin = experiment.coin(request_id)
    picked = team_draft(control.items, treatment.items, lambda item: item.item_id, k, coin)
    items = [
        msgspec.structs.replace(item, rank=rank, team=experiment.arms[team].name)
        for rank, (item, team) in enumerate(picked, start=1)
    ]
    degraded = list(dict.fromkeys([*control.degraded, *treatment.degraded]))
    return msgspec.structs.replace(control, items=items, degraded=degraded, exact=False)


def _teams(
    answer: RecommendResponse | RankResponse, experiment: Experiment
) -> list[tuple[str, int]]:
    """Returns each item of an interleaved slate with its team; nothing for other answers."""
    if experiment.settings.mode != "interleaved":
        return []
    numbers = {arm.name: number for number, arm in enumerate(experiment.arms)}
    teams = [(item.item_id, numbers.get(getattr(item, "team", ""))) for item in answer.items]
    return [(item_id, team) for item_id, team in teams if team is not None]


def _item_ids(answer: RecommendResponse | RankResponse) -> list[str]:
    return [item.item_id for item in answer.items]


def _is_empty(answer: RecommendResponse | RankResponse) -> bool:
    """Whether an answer has no item from a model, although a model was asked."""
    if isinstance(answer, RankResponse):
        return not answer.items
    asked = answer.strategy not in LISTS  # a user without a history gets `popular`
    return asked and not any(item.source == "model" for item in answer.items)


def _record_answer(
    experiment: Experiment,
    arm: ServingArm,
    began_s: float,
    answer: RecommendResponse | RankResponse,
) -> None:
    if DEADLINE_PASSED in answer.degraded:  # a list stands in for the arm, which failed
        experiment.record(arm, ArmResult(seconds=None, failed=True))
        return
    seconds = time.monotonic() - began_s
    experiment.record(arm, ArmResult(seconds, empty=_is_empty(answer)))


def _record_error(experiment: Experiment, arm: ServingArm, error: BaseException) -> None:
    """Records an error for its arm, unless the client is at fault.

    The client may be at fault if the arm's server refuses; `_record_refusal` records that.
    """
    if isinstance(error, ForwardingError) and error.result == "refused":
        return
    if _is_failure(error) or _is_misfit(error, arm):
        experiment.record(arm, ArmResult(seconds=None, failed=True))


def _record_refusal(experiment: Experiment, arm: ServingArm, error: BaseException) -> None:
    """Records a refusal of the arm's server as an error. The control has answered the request."""
    if isinstance(error, ForwardingError) and error.result == "refused":
        experiment.record(arm, ArmResult(seconds=None, failed=True))


def _is_failure(error: BaseException) -> bool:
    """Returns whether an arm may be at fault: status 5xx, or 429 of a full queue.

    A server that is loading or draining says nothing about its arms.
    """
    row = row_of(error)
    fault = row.status >= 500 or row.status == 429
    return fault and row.reason != "not_ready" and isinstance(error, Exception)


def _is_late(error: Exception) -> bool:
    forwarded = isinstance(error, ForwardingError) and error.result == "late"
    return forwarded or isinstance(error, DeadlineExceeded)


def _is_misfit(error: BaseException, arm: ServingArm) -> bool:
    """Returns whether an error is about a field that the arm sets."""
    if not isinstance(error, InvalidRequest) or error.param is None:
        return False
    return error.param.split(".")[0].split("[")[0] in arm.fields.values


COUNTS = (
    ("requests", "Requests of an arm of an experiment"),
    ("errors", "Requests of an arm that failed on the server's side"),
    ("empty", "Answers of an arm without an item from a model or without a token"),
)
COMPARED: tuple[tuple[Comparison, str], ...] = (
    ("answers", "Requests that both arms answered"),
    ("shared", "Sum over these of the share of the control's items that the other arm has"),
    ("identical", "Requests with the same items in the same order in both arms"),
    ("dropped", "Copies dropped because the server was busy, and pairs cut by the deadline"),
)


class ExperimentCollector(Collector):
    """Exports the state of the experiments. Label values come from the configuration."""

    def __init__(self, experiments: Experiments) -> None:
        self.experiments = experiments

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on the configuration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        found = list(self.experiments)
        for column, (name, text) in enumerate(COUNTS):
            family = CounterMetricFamily(f"recserve_experiment_{name}", text, labels=["arm"])
            for one in found:
                for arm in one.arms:
                    family.add_metric([arm.label], int(one.head.results[arm.number, column]))
            yield family
        forwarded = CounterMetricFamily(
            "recserve_experiment_forwarded",
            "Requests for the other server of an arm by what became of them",
            labels=["arm", "result"],
        )
        for one in found:
            for arm in (arm for arm in one.arms if arm.remote):
                counts = one.head.forwarded[arm.number].tolist()
                for result, count in zip(FORWARDINGS, counts, strict=True):
                    forwarded.add_metric([arm.label, result], count)
        yield forwarded
        running = GaugeMetricFamily(
            "recserve_experiment_running", "1 while the experiment runs", labels=["experiment"]
        )
        fallbacks = CounterMetricFamily(
            "recserve_experiment_fallbacks",
            "Automatic fall-backs to the control, by the guard that decided",
            labels=["experiment", "reason"],
        )
        ratio = GaugeMetricFamily(
            "recserve_experiment_sample_ratio_p",
            "P-value that users are divided by the weights; doubtful below 0.001, wrong below 1e-5",
            labels=["experiment"],
        )
        for one in found:
            if (p := one.division()[1]) is not None:
                ratio.add_metric([one.settings.name], p)
        yield ratio
        for one in found:
            running.add_metric([one.settings.name], one.status == "running")
            for cause, count in one.fallbacks.items():
                fallbacks.add_metric([one.settings.name, cause], count)
        for name, text in COMPARED:
            family = CounterMetricFamily(
                f"recserve_experiment_compared_{name}", text, labels=["experiment"]
            )
            for one in found:
                family.add_metric([one.settings.name], one.compared[name])
            yield family
        yield running
        yield fallbacks
