"""The columns ``turn`` and ``anchor``: when turns count as shown the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coupler.batch.trajectory import Origin, Segment
from coupler.conversation.messages import Said
from coupler.conversation.packing import Sample, pack, with_needed
from coupler.conversation.tree import Row as Path
from coupler.conversation.tree import Tree, Turn, digest
from coupler.data import Prompt, Row
from coupler.interfaces import Completion

BOTH = frozenset({"turn", "anchor"})


def said(role: str, text: str) -> Said:
    return Said.of({"role": role, "content": text})


def asked(text: str) -> Said:
    return said("user", text)


def added(tree: Tree, parent: Turn | None, told: list[Said], *ids: int, sampled: int = 9) -> Turn:
    """Add a turn that was shown ``told`` as ``ids``, and answered by one token."""
    origin = Origin.OBSERVATION if parent else Origin.PROMPT
    glue = (Segment((5,), Origin.GLUE),) if parent else ()
    segments = (*glue, Segment(ids, origin))
    prompt = (*(parent.ids if parent else ()), *(i for s in segments for i in s.ids))
    done = Completion((sampled,), (-1.0,), (0,), "stop")
    words = (*told, said("assistant", f"a{sampled}")) if told else ()
    turn = Turn(parent, segments, done, digest(prompt), said=words)
    tree.add(turn)
    return turn


def test_equal_messages_are_one_anchor_whatever_was_answered_before() -> None:
    tree = Tree()
    first = added(tree, None, [said("system", "s"), asked("q")], 1, 2)
    second = added(tree, first, [asked("door")], 3)
    third = added(tree, second, [asked("hall")], 4)
    again = added(tree, third, [asked("door")], 3, sampled=8)
    assert second.anchor == again.anchor
    assert len({turn.anchor for turn in tree.turns}) == 3


def test_a_history_that_is_rendered_anew_counts_from_its_last_answer() -> None:
    tree = Tree()
    first = added(tree, None, [asked("q")], 1)
    second = added(tree, first, [asked("door")], 3)
    short = [said("system", "notes"), asked("q"), said("assistant", "cut"), asked("door")]
    anew = added(tree, None, short, 6, 7)
    assert anew.anchor == second.anchor != first.anchor


def test_the_role_is_part_of_what_was_shown() -> None:
    tree = Tree()
    first = added(tree, None, [asked("q")], 1)
    told = [added(tree, first, [said(role, "x")], 3).anchor for role in ("user", "tool")]
    assert told[0] != told[1]


def test_turns_without_messages_compare_ids_but_glue() -> None:
    tree = Tree()
    first = added(tree, None, [], 1, 2)
    second = added(tree, first, [], 3)
    third = added(tree, second, [], 3)
    more = replace(third, segments=third.segments[1:])
    assert second.anchor == third.anchor == more.anchor == digest((3,))
    assert first.anchor == digest((1, 2))


def test_rows_say_which_turn_came_first() -> None:
    """The other game begins before the second turn, and its row is the first."""
    tree = Tree()
    first = added(tree, None, [asked("q")], 1, sampled=10)
    added(tree, None, [asked("game")], 2, sampled=11)
    added(tree, first, [asked("go on")], 3, sampled=12)
    rows = tree.rows()
    assert [row.numbers for row in rows] == [(1,), (0, 2)]
    assert [len(row.anchors) for row in rows] == [1, 2]

    prompt = Prompt(Row("p", "a", 0, {}), (1,))
    alone = Sample(prompt, (Path.of_one_turn((1,), first.completion),), 1.0, "", "stop")
    samples = [Sample(prompt, rows, 1.0, "", "stop"), alone]
    group = pack(samples, 0, 2, 1.0)
    assert not group.has("turn") and with_needed(group, samples, frozenset()) is group

    batch = with_needed(group, samples, BOTH)
    mask, turn, anchor = batch["loss_mask"], batch["turn"], batch["anchor"]
    found = dict(zip(batch["tokens"][mask].tolist(), turn[mask].tolist(), strict=True))
    assert batch["tokens"][mask].tolist() == [11, 10, 12, 10]
    assert turn[mask].tolist() == [1, 0, 2, 0] and found[12] == 2
    assert (turn.dtype, anchor.dtype) == (np.int32, np.int64)
    assert len(set(anchor[mask].tolist())) == 4
    assert (turn[~mask] == -1).all() and (anchor[~mask] == -1).all()
