"""Plans: plain data that is checked."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbf_pruner.errors import PlanError
from sbf_pruner.graph import trace
from sbf_pruner.plan import Plan
from zoo import ZOO

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
plans = st.dictionaries(names, st.sets(st.integers(0, 99), max_size=8), max_size=5).map(Plan)


def test_filters_are_sorted_plain_numbers():
    plan = Plan({"conv": np.array([4, 0, 2])})
    assert plan.keep["conv"] == (0, 2, 4)
    assert all(type(i) is int for i in plan.keep["conv"])
    assert plan.widths() == {"conv": 3}
    assert Plan({"conv": []}).widths() == {"conv": 0}


def test_a_plan_cannot_be_changed():
    given = {"conv": [0, 1]}
    plan = Plan(given)
    given["conv"].append(2)
    given["other"] = [0]
    assert dict(plan.keep) == {"conv": (0, 1)}
    with pytest.raises(TypeError):
        plan.keep["conv"] = (0,)
    with pytest.raises(AttributeError):
        plan.keep = {}


@given(plans)
def test_json_and_pickle_give_the_same_plan_back(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(Plan(dict(plan.keep))) == hash(plan)


def test_json_is_one_line_per_layer():
    text = Plan({"a.conv": [0, 1], "b": []}).to_json()
    assert '    "a.conv": [0, 1],\n    "b": []\n' in text
    assert json.loads(text) == {"format": "sbf-pruner plan 1", "keep": {"a.conv": [0, 1], "b": []}}


def test_files(tmp_path):
    plan = Plan({"conv": [1, 3]})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_masks():
    graph = trace(*ZOO["Plain"]())
    masks = Plan({"4": [1, 5]}).masks(graph)
    assert masks["4"].tolist() == [False, True, False, False, False, True]
    assert all(mask.all() for name, mask in masks.items() if name != "4")
    assert Plan.from_masks(masks).keep["4"] == (1, 5)


def test_one_plan_after_another():
    first = Plan({"a": [1, 4, 6], "b": [0, 1], "gone": []})
    later = Plan({"a": [0, 2], "c": [3]})
    assert first.then(later) == Plan({"a": [1, 6], "b": [0, 1], "gone": [], "c": [3]})


@given(st.sets(st.integers(0, 30), min_size=1), st.data())
def test_following_plans_is_following_indices(kept, data):
    first = sorted(kept)
    second = data.draw(st.sets(st.integers(0, len(first) - 1)))
    found = Plan({"a": first}).then(Plan({"a": second})).keep["a"]
    assert list(found) == [first[i] for i in sorted(second)]


@pytest.mark.parametrize("bad", [[0.5], ["x"], [None], [True], 7, None, [[0]]])
def test_what_is_not_a_list_of_filter_numbers_is_refused(bad):
    with pytest.raises(PlanError, match="the plan's entry for conv "):
        Plan({"conv": bad})


def test_a_later_plan_must_fit_what_the_first_one_leaves():
    with pytest.raises(
        PlanError, match="a: the later plan keeps filter 3, but this one keeps 2 filters; make the later"
    ):
        Plan({"a": [1, 4]}).then(Plan({"a": [0, 3]}))
