"""Versions over random trees of lineages are compared as a list of their ancestors compares them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.records import Lines, PolicyVersion


@st.composite
def runs(draw: st.DrawFn) -> tuple[Lines, Mapping[PolicyVersion, list[object]]]:
    """A run with rollbacks: its lines, and the steps that led to each version; equal steps make equal weights."""
    parents: dict[tuple[str, int], PolicyVersion] = {}
    repeated: dict[PolicyVersion, PolicyVersion] = {}
    history: dict[PolicyVersion, list[object]] = {}
    for lineage in range(draw(st.integers(1, 6))):
        start = draw(st.sampled_from([None, *history])) if history else None
        weights: list[object] = ["initial"] if start is None else list(history[start])
        first = 0 if start is None else start.step
        if start is not None:
            parents["p", lineage] = start
        for step in range(first, first + 1 + draw(st.integers(0, 4))):
            version = PolicyVersion("p", lineage, step)
            if step > first:
                weights = [*weights, draw(st.integers(0, 1))]
                if (earlier := next((one for one in history if history[one] == weights), version)) != version:
                    repeated[version] = earlier
            history[version] = weights
    return Lines(parents, repeated), history


@given(runs(), st.data())
def test_ages_forks_and_survival_follow_from_the_ancestors(
    run: tuple[Lines, Mapping[PolicyVersion, list[object]]], data: st.DataObject
) -> None:
    lines, history = run
    version, at = (data.draw(st.sampled_from(sorted(history))) for _ in range(2))
    pairs = zip(history[version], history[at], strict=False)
    shared = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert lines.fork(version, at) == len(shared) - 1
    assert lines.survives(version, at) == (history[at][: version.step + 1] == history[version])
    assert lines.age(version, at) == max(version.step, at.step) - (len(shared) - 1)
    assert lines.age(version, at) == lines.age(at, version)
    assert (lines.age(version, at) == 0) == (history[version] == history[at])
    assert (lines.weights(version) == lines.weights(at)) == (history[version] == history[at])
    before = lines.before(at, step := data.draw(st.integers(0, at.step)))
    assert history[before] == history[at][: step + 1]
