"""The front door: fit, synthesise, evaluate. Data flows left to right and never back.

data --fit--> Release --synthesise--> SyntheticSet --evaluate--> Scores
private |        free for ever
                 Release --sample--> more of a generator's records
                 Release --classifier--> what a trainer trained
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Sequence

from torch import nn

from understudy.data.heldout import HeldOut
from understudy.data.synthetic import SyntheticSet
from understudy.engine import Engine, Progress, silent
from understudy.errors import BadConfiguration
from understudy.evaluation.classify import Protocol, Scores, train_and_test
from understudy.evaluation.fidelity import check_alike
from understudy.methods import Generative, Mechanism, Method, Trainer, mechanism_named
from understudy.methods.matching import Matching, Watch
from understudy.privacy.accounting import Budget, calibrate
from understudy.privacy.events import Event, Plan, Query, Step
from understudy.privacy.gate import PrivateDataset
from understudy.privacy.ledger import Grant, Ledger
from understudy.privacy.noise import Secret
from understudy.privacy.public import Public
from understudy.privacy.release import Release

COUNTING_SHARE = 0.01
"""Share of the budget (in units of 1 / variance) that measuring private class sizes takes."""


class DeltaTooLarge(UserWarning):
    """delta is not much smaller than one over the number of records."""


def fit(
    data: PrivateDataset,
    method: Mechanism,
    *,
    budget: Budget | None = None,
    delta: float = 1e-5,
    ledger: Ledger | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
    secret: Secret | None = None,
) -> Release:
    """Measure the records with a method and return the Release.

    With a ``budget`` the method's noise is calibrated to it; without one its own
    ``noise_multiplier`` holds and is priced at ``delta``. The cost is reserved in the ``ledger``
    (by default the one in the user's state folder that belongs to these records) before anything
    is read. A run that was killed is taken up where it stopped. ``secret`` is for tests only: a
    known secret makes the release not private, and its statement says so.
    """
    ledger = ledger or data.ledger()
    engine = engine or Engine()
    with contextlib.ExitStack() as stack:
        public = data.public
        before: tuple[Grant, ...] = ()
        events: tuple[Event, ...] = ()
        if public.counts is None:
            if budget is None:
                raise BadConfiguration(
                    "Class sizes are private here, so they must be measured out of a budget: "
                    "give one, or declare the class sizes public."
                )
            counting = Plan(Step(_counting_query(public, budget), times=1))
            events = counting.events(public)
            gate = stack.enter_context(
                data.open(
                    counting,
                    by=method.name,
                    recipe={"stage": "class sizes", **method.recipe()},
                    ledger=ledger,
                    budget=budget,
                    secret=secret,
                    engine=engine,
                )
            )
            noisy = gate.noisy_counts(counting[0].query).value
            public = public.measured(tuple(max(1, round(count)) for count in noisy.tolist()))
            before = (gate.grant,)
        if budget is not None:
            method = method.calibrated(public, budget, earlier=events)
        else:
            budget = Budget(max(method.epsilon(public, delta), 1e-12), delta)
        _warn_about_delta(public, budget.delta)
        gate = stack.enter_context(
            data.open(
                method.plan(public),
                by=method.name,
                recipe=method.recipe(),
                ledger=ledger,
                budget=budget,
                public=public,
                before=before,
                secret=secret,
                engine=engine,
                progress=progress,
            )
        )
        return method.measure(gate)


def _counting_query(public: Public, budget: Budget) -> Query:
    def alone(noise_multiplier: float) -> Query:
        return Query(
            name="class sizes", bound=1.0, noise_multiplier=noise_multiplier, per_class=True
        )

    if math.isinf(budget.epsilon):
        return alone(0.0)
    whole = calibrate(
        lambda value: Plan(Step(alone(value), times=1)).events(public),
        budget,
        adjacency=public.adjacency,
        labels_fixed=public.labels == "public",
    )
    return alone(whole / math.sqrt(COUNTING_SHARE))


def _warn_about_delta(public: Public, delta: float) -> None:
    if delta >= 1 / public.size:
        warnings.warn(
            f"delta={delta:g} is not below 1/N = {1 / public.size:.2g} for these {public.size} "
            "records: a mechanism that publishes one record outright could meet it. Choose a "
            "smaller delta.",
            DeltaTooLarge,
            stacklevel=3,
        )


def synthesise(
    release: Release,
    method: Mechanism | None = None,
    *,
    engine: Engine | None = None,
    progress: Progress = silent,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 1000,
    watch: Watch | None = None,
) -> SyntheticSet:
    """Make a synthetic set from a Release. Free: nothing private is read.

    ``method`` defaults to the release's own recipe; give another configuration of the same method
    to try other set sizes, longer optimisation or another seed on the same signals.

    Of the matching methods, whose optimisation may be long, a ``checkpoint`` file keeps the state
    ``every`` so many steps, and a later call with the same arguments goes on from there;
    ``watch(steps done, set)`` sees the set as often. Other methods are done in one go.
    """
    recipe = release.recipe
    if method is None:
        made = mechanism_named(recipe["method"]).configured(recipe["configuration"])
        if not isinstance(made, Method):
            raise BadConfiguration(
                f"'{made.name}' releases a classifier and no synthetic set: `understudy evaluate`."
            )
        method = made
    elif not isinstance(method, Method):
        raise BadConfiguration(f"'{method.name}' makes no synthetic set.")
    elif method.name != recipe["method"]:
        raise BadConfiguration(
            f"This release was measured by '{recipe['method']}'; '{method.name}' cannot read its "
            "signals."
        )
    engine = engine or Engine()
    if not isinstance(method, Matching):
        return method.synthesise(release, engine=engine, progress=progress)
    return method.synthesise(
        release,
        engine=engine,
        progress=progress,
        checkpoint=checkpoint,
        every=every,
        watch=watch,
    )


def sample(
    release: Release,
    count: int,
    *,
    seed: int = 0,
    engine: Engine | None = None,
    progress: Progress = silent,
) -> SyntheticSet:
    """Draw ``count`` records from the generator a Release holds, classes in equal shares. Free."""
    recipe = release.recipe
    method = mechanism_named(recipe["method"]).configured(recipe["configuration"])
    if not isinstance(method, Generative):
        raise BadConfiguration(
            f"'{method.name}' releases no generator, so nothing can be drawn from it. Sets of "
            "another size or seed come from its signals: `understudy synthesise`."
        )
    if count < 1:
        raise BadConfiguration(f"Draw at least one record, not {count}.")
    return method.sample(release, count, seed=seed, engine=engine or Engine(), progress=progress)


def classifier(release: Release, *, engine: Engine | None = None) -> nn.Module:
    """Return the network a Trainer released, in evaluation mode."""
    recipe = release.recipe
    trainer = mechanism_named(recipe["method"]).configured(recipe["configuration"])
    if not isinstance(trainer, Trainer):
        raise BadConfiguration(f"'{trainer.name}' releases no classifier.")
    return trainer.classifier(release, engine=engine or Engine())


def evaluate(
    synthetic: SyntheticSet,
    heldout: HeldOut,
    *,
    protocol: Protocol | str = "dm",
    network: str | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    engine: Engine | None = None,
    progress: Progress = silent,
) -> Scores:
    """Train on the synthetic set, test on real held-out records. Last epoch, never the best.

    ``network`` replaces the protocol's own; tables get the MLP unless told otherwise.
    """
    check_alike(synthetic, heldout)
    if network is None and not synthetic.public.is_image:
        network = "mlp"
    engine = engine or Engine()
    return train_and_test(
        synthetic.images,
        synthetic.labels,
        heldout.images,
        heldout.labels,
        classes=len(synthetic.public.classes),
        protocol=protocol,
        network=network,
        seeds=tuple(seeds),
        device=engine.torch_device,
        precision=engine.dtype,
        progress=progress,
    )


__all__ = ["DeltaTooLarge", "classifier", "evaluate", "fit", "sample", "synthesise"]
