"""What a judge's reply states, by form; and scores of judges behind an endpoint that fails."""

from __future__ import annotations

import pytest

from tests.judge_cases import FAILURES, FORMS, Form, remote_verdicts


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind}: {form.reply!r:.40}")
def test_a_reply_states_its_score_in_one_form_or_is_refused(form: Form) -> None:
    assert form.read() == form.values


def test_the_forms_are_many_and_a_reader_of_the_last_number_is_wrong_about_them() -> None:
    assert len(FORMS) >= 60
    wrong = [form for form in FORMS if form.read_as_the_last_number() not in (None, form.values)]
    assert len(wrong) > 20


def test_failures_of_an_endpoint_are_never_scores() -> None:
    verdicts = remote_verdicts(300)
    assert verdicts.wrong == 0
    assert verdicts.dropped <= 3, "twelve attempts that fail are rare"
    assert verdicts.failures.total() > 90
    assert verdicts.failures.keys() == FAILURES.keys()
