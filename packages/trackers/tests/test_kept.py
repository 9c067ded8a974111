"""What is kept beside a library, to be given to it again."""

from __future__ import annotations

import json
from pathlib import Path

from coupler_trackers.kept import Kept, samples_until
from coupler_trackers.mlflow import _flat, _name


def test_a_rewind_returns_what_stays_and_drops_the_rest(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "trackers" / "acme.jsonl")
    assert kept.rewind(5) == []
    for step in range(4):
        kept.add(step, {"loss": float(step), "odd ✓": float("inf")})
    with kept.path.open("a") as file:
        file.write('[4, {"loss": 4')  # a kill cut it off

    found = kept.rewind(2)
    assert [step for step, _ in found] == [0, 1, 2]
    assert found[2][1] == {"loss": 2.0, "odd ✓": float("inf")}
    kept.add(3, {})
    assert [step for step, _ in Kept(kept.path).rewind(9)] == [0, 1, 2, 3]


def test_samples_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for step in (2, 10, 1, 12):
        (tmp_path / "samples" / f"step_{step}.jsonl").write_text(json.dumps({"step": step}) + "\n")
    (tmp_path / "samples" / "step_mine.jsonl").write_text("no rows")
    found = list(samples_until(tmp_path, 10))
    assert found == [(1, [{"step": 1}]), (2, [{"step": 2}]), (10, [{"step": 10}])]


def test_mlflow_gets_names_that_it_takes() -> None:
    names = {
        "reward/mean": "reward/mean",
        "../../outside": "outside",
        'a="b"; c%': "a__b__ c_",
        "größe": "größe",
        "": "unnamed",
        "x" * 300: "x" * 250,
    }
    assert {name: _name(name) for name in names} == names
    assert _flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}
