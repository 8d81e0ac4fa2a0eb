from copy import deepcopy

from benchmarks.lengths import ADAPTIVE, DEEPEST, SPACING, STARTS, Contest, _rows
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from tests.models.tiny import build, texts


def test_every_length_and_adaptive_write_the_same_text_from_the_same_place(monkeypatch):
    target = HFTarget(build("llama"), name="tiny")
    fixed = load_drafter("draft_model", target, deepcopy(target.model))  # all its drafts are accepted
    starts = []
    contest = Contest(target, fixed, [texts(1, 12)], 9)
    prompt_length = contest.prompts[0].shape[1]
    start = target.start
    monkeypatch.setattr(
        target, "start", lambda ids, *more, **named: starts.append(ids.shape[1]) or start(ids, *more, **named)
    )
    done, made = [], []
    for repeat in range(3):
        done.append(contest.once(repeat, lambda share: None))
        made.append(contest.ways[ADAPTIVE][0])
    assert made[0] is made[1] and made[1] is not made[2]
    assert {prompt_length - SPACING * (STARTS - 1), prompt_length - SPACING * (STARTS - 2)} < set(starts)
    assert all([row.tokens for row in totals.rows] == [8] for seen in done for totals in seen.values())
    rows = _rows("stories", done)
    assert [row["lane"] for row in rows] == [*(f"k = {k}" for k in range(1, DEEPEST + 1)), ADAPTIVE]
    assert any(row["of the best"].value == 1.0 for row in rows)
    assert rows[2]["tokens/pass"] == 4.0
