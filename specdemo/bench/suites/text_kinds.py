"""Kinds of text, on the lanes that have a drafter in both families."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from specdemo.bench.base import Axis, Decoding, Report, Stop
from specdemo.bench.prompts import CODE, EDITS, PROMPTS
from specdemo.bench.result import ALL, Result, Row
from specdemo.core.settings import Setting
from specdemo.engine.comparison import Lane
from specdemo.presets.files import preset
from specdemo.presets.pair import add_pair, work_prompts

if TYPE_CHECKING:
    from specdemo.bench.measure import Compared

KINDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "stories": {"stories": PROMPTS},
    "code": {"code": CODE, "edits": EDITS, "unknown": PROMPTS},
}
OF_CODE: Mapping[str | None, str | None] = {  # drafter of stories -> drafter of code
    None: None,
    "stories-draft-wide": "code-draft",
    "stories-eagle-1": "code-eagle-1",
}
EDITING = "embedded-code-edit"


class KindOfText(Decoding):
    """Compares kinds of text: stories, code, edits of code, and text unlike the training data; for another target
    the kinds of work of `tune`.
    """

    name = "text"
    order = 10
    title = "Kind of text"
    question = (
        "How much depends on the text? The same methods on stories, code, edits, and text unlike the training data."
    )
    axis = Axis("text", "kind of text", "kind of text")
    target: Annotated[str | None, Setting("Another target: folder, hub id or GGUF file.", metavar="MODEL")] = None
    draft: Annotated[str | None, Setting("Its draft model or head; else n-grams, suffixes.", metavar="MODEL")] = None

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.measure import Question, compare_lanes
        from specdemo.bench.sweeps import Partial, comparison
        from specdemo.engine.session import Session

        sets = self._sets()
        progress = Partial(self, ", ".join(target for target, _, _ in sets), report, "text")
        rows: list[dict[str, object]] = []
        remarks: list[str] = []
        for turn, (target, lanes, kinds) in enumerate(sets):
            questions = [Question(text, kind) for kind, texts in kinds.items() for text in texts]

            def report_progress(share: float, what: str, turn: int = turn, target: str = target) -> None:
                progress((turn + share) / len(sets), f"{target}, {what}")

            def show(so_far: Callable[[], "Compared"], finished: Sequence[Row] = tuple(rows)) -> None:
                progress.show(lambda: [*finished, *_rows(so_far())])

            spec = comparison(self, target, lanes)
            seen = compare_lanes(Session(), spec, questions, self.repeats, report_progress, cancelled, show)
            rows += _rows(seen)
            remarks += seen.remarks
        config = self.config(progress.target)
        return Result(self.name, len(seen.tallies), config, seen.environment, rows, [_order(rows), *remarks], "text")

    def _sets(self) -> list[tuple[str, tuple[Lane, ...], Mapping[str, Sequence[str]]]]:
        """Return targets with their lanes and their prompts by kind."""
        from specdemo.bench.sweeps import shipped_lanes

        if self.target:
            return [(self.target, tuple(add_pair(self.target, self.draft).lanes), work_prompts())]
        stories = tuple(lane for lane in shipped_lanes() if _of_code(lane))
        lanes = {"stories": stories, "code": tuple(filter(None, map(_of_code, stories)))}
        return [(target, lanes[target], kinds) for target, kinds in KINDS.items()]


def _rows(seen: "Compared") -> list[Row]:
    """Return the rows of each kind of text, with the acceptance at the first four positions."""
    rows = []
    for row, at in zip(seen.rows([{} for _ in seen.names]), seen.places(), strict=True):
        kind = {"text": row.pop("category"), "lane": row.pop("lane")}
        if kind["text"] != ALL:
            rows.append({**kind, **row, **{f"accepted at {i}": share for i, share in enumerate(at[:4], start=1)}})
    return rows


def _of_code(lane: Lane) -> Lane | None:
    """Return the corresponding lane of the code target with its preset's draft length; None without a corresponding
    drafter.
    """
    if not {*lane.models, None} <= OF_CODE.keys():
        return None
    lengths = {own.method: own.k for own in preset(EDITING).lanes}
    return lane.model_copy(update={"model": OF_CODE[lane.model], "k": lengths.get(lane.method, lane.k)})


def _order(rows: list[Row]) -> str:
    """Explain in one sentence why one kind of text gains more than another."""
    kinds = dict.fromkeys(row["text"] for row in rows)
    best = [max((row for row in rows if row["text"] == kind), key=_times) for kind in kinds]
    best.sort(key=_times, reverse=True)
    words = "; ".join(
        f"{row['text']} {row['speed-up'].format()} with {row['tokens/pass']:.1f} tokens per pass ({row['lane']})"
        for row in best
    )
    return f"A pass costs the same for every text, so the gain depends on the acceptance rate: {words}."


def _times(row: Row) -> float:
    value: float = row["speed-up"].value
    return value
