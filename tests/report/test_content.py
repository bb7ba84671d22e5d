"""What a report says, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.report.samples import audit, digits, measured, scores
from understudy.data.synthetic import SyntheticSet
from understudy.errors import ReleaseError, UsageError
from understudy.privacy.noise import Secret
from understudy.report import Entry, content, gather, render_json
from understudy.report.content import attack_bound


def test_it_says_what_the_statement_says(entry: Entry) -> None:
    section = gather([entry]).sections[0]
    statement = entry.release.statement
    assert section.epsilon == statement.epsilon
    assert section.delta == statement.delta
    assert section.paragraph == statement.paragraph()
    assert section.private
    assert [question.times for question in section.questions] == [5]
    assert section.assumptions == statement.assumptions
    assert section.departures == statement.departures


def test_one_question_costs_alone_what_all_cost_together(entry: Entry) -> None:
    section = gather([entry]).sections[0]
    assert section.questions[0].epsilon_alone == pytest.approx(section.epsilon)


def test_epsilon_is_told_step_by_step_up_to_all_of_it(entry: Entry, open_entry: Entry) -> None:
    section = gather([entry]).sections[0]
    assert [point.answers for point in section.spent] == [1, 2, 3, 4, 5]
    spent = [point.epsilon for point in section.spent]
    assert spent == sorted(spent) and 0 < spent[0] < spent[-1] == pytest.approx(section.epsilon)
    assert spent[0] == content._price(
        (dataclasses.replace(entry.release.statement.events[0], times=1),),
        entry.release.statement,
        entry.release.statement.accountant,
    )
    assert gather([open_entry]).sections[0].spent == (), "without noise there is nothing to spend"


def test_the_questions_of_a_stage_take_turns_and_stages_do_not(entry: Entry) -> None:
    statement = entry.release.statement
    event = dataclasses.replace(statement.events[0], noise_multiplier=40.0)
    events = tuple(
        dataclasses.replace(event, name=name, times=times)
        for name, times in (("a", 8), ("b", 92), ("c", 100))
    )
    spent = content._spent(dataclasses.replace(statement, events=events, stages=(2, 1)))
    assert [point.answers for point in spent] == [1, 25, 50, 75, 100, 125, 150, 175, 200]
    half = (dataclasses.replace(event, times=4), dataclasses.replace(event, times=46))
    assert spent[2].epsilon == content._price(half, statement, statement.accountant)


def test_every_image_is_there_in_its_class(entry: Entry) -> None:
    section = gather([entry]).sections[0]
    assert section.pictured == section.size == 50
    assert [len(group.pictures) for group in section.groups] == [5] * 10
    assert section.real_size == 1797


def test_too_many_images_are_cut_evenly(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_PICTURES", 20)
    section = gather([entry]).sections[0]
    assert [len(group.pictures) for group in section.groups] == [2] * 10
    assert [group.count for group in section.groups] == [5] * 10


def test_scores_are_computed_from_the_confusions(entry: Entry) -> None:
    forged: dict[str, Any] = {**scores(10), "accuracy": 0.999, "interval_95": [0.998, 1.0]}
    honest = gather([dataclasses.replace(entry, scores={"net": scores(10)})]).sections[0].scores[0]
    read = gather([dataclasses.replace(entry, scores={"net": forged})]).sections[0].scores[0]
    assert read == honest
    assert read.low is not None
    assert read.low < read.accuracy


def test_a_single_seed_has_no_interval(entry: Entry) -> None:
    assert gather([entry]).sections[0].scores[1].low is None


def test_without_any_spread_there_is_no_interval(entry: Entry) -> None:
    """A model that draws nothing at random gives three times the same, not plus or minus zero."""
    found = scores(10)
    same: dict[str, Any] = {**found, "confusions": [found["confusions"][0]] * 3}
    (score,) = gather([dataclasses.replace(entry, scores={"net": same})]).sections[0].scores
    assert score.low is None
    assert score.interval == "every seed gave the same"
    assert "±" not in score.text


def test_the_class_that_is_recognised_least_is_named(entry: Entry) -> None:
    score = gather([entry]).sections[0].scores[0]
    assert score.weakest is not None
    assert score.per_class[score.weakest] == min(filter(None, score.per_class))
    even = dataclasses.replace(score, per_class=(0.5, None, 0.5))
    assert even.weakest is None


def test_the_strongest_attack_is_named(entry: Entry) -> None:
    audited = gather([entry]).sections[0].audited
    assert audited is not None and audited.strongest is not None
    assert audited.strongest.epsilon == audited.lower_bound
    silent = dataclasses.replace(audited.strongest, epsilon=0.0)
    assert dataclasses.replace(audited, attacks=(silent,)).strongest is None
    assert dataclasses.replace(audited, attacks=()).strongest is None


def test_a_run_still_going_is_an_error(entry: Entry) -> None:
    with pytest.raises(ReleaseError, match=r"still going.*same `understudy synth` command"):
        gather([dataclasses.replace(entry, synthetic=None)])
    empty = SyntheticSet(
        images=torch.zeros(0, 1, 8, 8),
        labels=torch.zeros(0, dtype=torch.long),
        public=entry.release.public,
    )
    with pytest.raises(ReleaseError, match="no synthetic set yet"):
        gather([dataclasses.replace(entry, synthetic=empty)])


def test_nothing_to_report_on_is_an_error() -> None:
    with pytest.raises(UsageError, match="no release to report on"):
        gather([])


def test_a_set_of_another_release_is_refused(entry: Entry, table_entry: Entry) -> None:
    with pytest.raises(ReleaseError, match="do not belong together"):
        gather([dataclasses.replace(entry, synthetic=table_entry.synthetic)])


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"accuracy": 0.9}, "cannot be read"),
        (scores(7), "not about its 10 classes"),
        ({**scores(10), "seeds": [0]}, "one result a seed"),
        ({**scores(10), "confusions": [[[0] * 10] * 10] * 3}, "no test records"),
        ({**scores(10), "confusions": "none"}, "cannot be read"),
    ],
)
def test_scores_that_do_not_fit_are_refused(
    entry: Entry, broken: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ReleaseError, match=reason):
        gather([dataclasses.replace(entry, scores={"net": broken})])


def test_references_fidelity_and_audit_are_told(entry: Entry) -> None:
    section = gather([entry]).sections[0]
    (ceiling,) = section.ceilings
    assert (ceiling.score.name, ceiling.told) == ("random-real", "fifty real records")
    assert section.resemblance is not None and section.audited is not None
    frechet, _, score, *_, nearest = section.resemblance.figures
    assert (frechet.synthetic, frechet.real) == ("41.5", "1.25")
    assert "not FID" in frechet.title
    assert (score.synthetic, score.real) == ("–", "8.5")
    assert nearest.synthetic == "1.5, 2.5"
    assert all(figure.meaning for figure in section.resemblance.figures)
    assert (section.audited.lower_bound, section.audited.claimed) == (0.25, 1.0)
    assert section.audited.passed


def test_a_configuration_is_told_in_words(entry: Entry) -> None:
    recipe = {"method": "ldpdc", "configuration": {"a": None, "b": "", "c": True, "d": [1, False]}}
    release = dataclasses.replace(entry.release, recipe=recipe)
    (told,) = gather([dataclasses.replace(entry, release=release)]).sections
    assert told.configuration == {"a": "none", "b": "none", "c": "yes", "d": "1, no"}


def test_what_the_guarantee_does_not_cover_is_said(entry: Entry) -> None:
    told = " ".join(gather([entry]).sections[0].uncovered)
    for words in (
        "Accuracy was measured on real test records (digits of another school)",
        "references were computed from real training records",
        "Fidelity compares the set with real test records",
    ):
        assert words in told, words
    bare = dataclasses.replace(entry, scores={}, ceilings={}, fidelity=None, baselines={})
    assert gather([bare]).sections[0].uncovered == ()


def test_whether_an_audit_passed_is_found_again_from_its_numbers(entry: Entry) -> None:
    for found in (
        audit(1.5, passed=True),
        audit(0.5, passed=True, findings=["one query too many"]),
        audit(float("inf")),
    ):
        section = gather([dataclasses.replace(entry, audit=found)]).sections[0]
        assert section.audited is not None and not section.audited.passed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"audit": {"claimed": 1.0}}, "audit of .* cannot be read"),
        ({"audit": {**audit(), "claimed": "much"}}, "audit of .* cannot be read"),
        ({"fidelity": {"features": "x"}}, "fidelity figures of .* cannot be read"),
        ({"ceilings": {"dm": scores(7)}}, "not about its 10 classes"),
    ],
)
def test_what_lies_beside_a_release_must_fit(
    entry: Entry, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ReleaseError, match=reason):
        gather([dataclasses.replace(entry, **changes)])


def test_a_known_secret_means_no_guarantee(folder: Path) -> None:
    release, synthetic = measured(
        digits(), folder / "known.jsonl", secret=Secret.for_testing(0), epsilon=0.5
    )
    section = gather([Entry(release=release, synthetic=synthetic, title="known")]).sections[0]
    assert not section.private
    assert section.best_guess == 1.0
    assert all(catch.found_at_most == pytest.approx(1.0) for catch in section.catches)


def test_a_table_is_decoded_by_its_columns(table_entry: Entry) -> None:
    rows = gather([table_entry]).sections[0].rows
    assert rows is not None
    assert rows.columns == ("class", "age <years>", "sex")
    assert {row[0] for row in rows.rows} == {"no", "yes"}
    for _, age, sex in rows.rows:
        assert 17 <= float(age) <= 90
        assert sex in ("Female", "Male", "(missing)")


def test_a_table_without_columns_shows_numbers(table_entry: Entry) -> None:
    assert table_entry.synthetic is not None
    public = dataclasses.replace(table_entry.release.public, columns=())
    bare = dataclasses.replace(
        table_entry,
        release=dataclasses.replace(table_entry.release, public=public),
        synthetic=dataclasses.replace(table_entry.synthetic, public=public),
    )
    rows = gather([bare]).sections[0].rows
    assert rows is not None
    assert rows.columns == ("class", "feature 0", "feature 1", "feature 2")


def test_where_the_folder_lies_is_not_told(entry: Entry) -> None:
    text = render_json(gather([entry]))
    assert "digits-release/synthetic.safetensors" in text
    assert "of mine" not in text


# The ledger, and several releases


def test_earlier_runs_are_counted(several: list[Entry]) -> None:
    last = gather([several[2]]).sections[0]
    assert len(last.earlier) == 2
    assert last.total_epsilon > last.epsilon
    assert last.earlier[0].epsilon_alone == pytest.approx(several[0].release.statement.epsilon)


def test_releases_of_the_same_records_add_up(several: list[Entry]) -> None:
    report = gather(several[:3])
    total = several[2].release.statement.total_epsilon
    assert report.comparison is not None
    assert any(f"epsilon {total:.4g}" in note for note in report.comparison.notes)


def test_releases_of_different_ledgers_do_not_pretend_to(
    several: list[Entry], entry: Entry
) -> None:
    comparison = gather([several[0], entry]).comparison
    assert comparison is not None
    assert any("no single ledger here has counted them all" in note for note in comparison.notes)


def test_the_same_release_twice_is_one_release(entry: Entry) -> None:
    comparison = gather([entry, entry]).comparison
    assert comparison is not None
    assert comparison.notes == ()


def test_a_comparison_warns(several: list[Entry], table_entry: Entry) -> None:
    comparison = gather([*several, table_entry]).comparison
    assert comparison is not None
    assert comparison.score == "ConvNet"
    text = " ".join(comparison.notes)
    assert "different datasets (digits; people)" in text
    assert "Not private, and only here for comparison: No noise." in text


def test_different_test_sets_are_warned_about(entry: Entry) -> None:
    other = dataclasses.replace(entry, test="digits of a third school")
    comparison = gather([entry, other]).comparison
    assert comparison is not None
    (note,) = comparison.notes
    assert "different test sets (digits of a third school, 360 records;" in note


# JSON


def test_json_is_strict_and_complete(several: list[Entry]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = gather(several)
    read = json.loads(render_json(report), parse_constant=refuse)
    assert read == report.to_json()
    assert read["sections"][3]["epsilon"] == "inf"
    assert float(read["sections"][3]["epsilon"]) == math.inf
    assert read["sections"][0]["scores"][0]["confusion"][0][0] > 0
    assert "data:image" not in json.dumps(read)


# The bound on attacks


def test_the_bound_is_that_of_the_hypothesis_test() -> None:
    assert attack_bound(0.01, 0.0, 0.0) == pytest.approx(0.01)
    assert attack_bound(0.01, 1.0, 1e-5) == pytest.approx(0.01 * math.e + 1e-5)
    assert attack_bound(0.0, 1.0, 1e-5) == pytest.approx(1e-5)
    assert attack_bound(1.0, 1.0, 1e-5) == 1.0
    assert attack_bound(0.0, math.inf, 1e-5) == pytest.approx(1.0)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 900.0])
def test_the_bound_is_a_concave_curve_that_both_inequalities_touch(epsilon: float) -> None:
    delta, grid = 1e-3, [step / 500 for step in range(501)]
    curve = [attack_bound(share, epsilon, delta) for share in grid]
    factor = math.exp(min(epsilon, 700))
    for share, found in zip(grid, curve, strict=True):
        assert share <= found + 1e-12 <= 1 + 1e-12
        assert found <= factor * share + delta + 1e-12  # members against outsiders
        assert 1 - share <= factor * (1 - found + 1e-15) + delta + 1e-9  # and the other way round
    slopes = [b - a for a, b in pairwise(curve)]
    assert all(a >= b - 1e-12 for a, b in pairwise(slopes))


def test_a_randomised_response_meets_the_best_guess_exactly(entry: Entry) -> None:
    section = gather([entry]).sections[0]
    e = math.exp(section.epsilon)
    assert section.best_guess == pytest.approx((e + section.delta) / (1 + e))
    # The corner of the curve is the best point for even odds.
    best = max(
        (attack_bound(x / 10000, section.epsilon, section.delta) + 1 - x / 10000) / 2
        for x in range(10001)
    )
    assert best == pytest.approx(section.best_guess, abs=1e-4)
