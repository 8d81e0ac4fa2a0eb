"""Suite `tune`: the speculation that pays for a model on this machine, by kind of work."""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import quote

from pydantic import AfterValidator, Field, PlainSerializer, model_validator

from specdemo.analysis.lanes import explain
from specdemo.bench.base import Decoding, File, Report, Stop, new_tokens_field
from specdemo.bench.candidates import lanes_to_try, shareable
from specdemo.bench.prompts import OWN, read_questions
from specdemo.bench.result import Result, Row, read_result, write_result
from specdemo.bench.search import KindOfWork, Search
from specdemo.core.atomic_io import cache_folder
from specdemo.core.estimate import Estimate, over_kinds
from specdemo.core.headline import PLAIN_DECODING
from specdemo.core.settings import setting
from specdemo.core.suggest import counted, suggest
from specdemo.core.tally import ratio
from specdemo.engine.comparison import Lane, Model
from specdemo.models.errors import Cancelled
from specdemo.models.local_models import DrafterFit, in_words
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import ABSENT, PLACES, drafters_of
from specdemo.presets.files import DEFAULT, preset
from specdemo.presets.pair import LOOKUPS, kind_of_work, pair, work_prompts
from specdemo.servers.address import address, allow
from specdemo.servers.engines import engine_names

if TYPE_CHECKING:
    from specdemo.bench.racer import Racer

RACE_LINK = "race"  # column of a row's race as the query of a link
YOURS = "your prompt"  # kind of work
MIXED = "mixed"  # category of all kinds together
MAX_CONTEXT = 4096  # most tokens of a lane of a GGUF model, because every candidate has a cache of its own
CONFIRMED = 3  # prompts per kind that only --confirm uses
CONFIRM_SHARE = 0.25  # of the time
EQUAL = 0.03  # difference of two speeds that does not matter


class Tune(Decoding):
    """Find the drafting method and draft length that pay most for a model, by kind of work."""

    name = "tune"
    title = "Which method fits?"
    target: Annotated[Model, PlainSerializer(lambda name: name.label, when_used="json")]
    drafts: Annotated[
        Sequence[Model], PlainSerializer(lambda names: [name.label for name in names], when_used="json")
    ] = setting((), "Drafter to try besides those found; repeatable.", metavar="MODEL", flag="--draft")
    work: str = setting(
        "", "Kinds of work, comma-separated: chat,summary,edit,code,json,translate; default: all of them."
    )
    prompt_file: File | None = setting(
        None,
        "Your prompts instead, one per line, or Spec-Bench's question.jsonl.",
        metavar="FILE",
        flag="--prompts",
    )
    prompt: Annotated[str, Field(exclude=True)] = setting(
        "", "Your prompt, measured first, and alone where time is short.", metavar="TEXT"
    )
    minutes: float = setting(5.0, "Time for the measurement, without loading the model.", above=0.0, high=1440.0)
    download: bool = setting(False, "Also try published drafters that are not on this machine.")
    new_tokens: int = new_tokens_field(64)
    confirm: bool = setting(False, "Compare the two best of each kind again, on other prompts.")
    engine: str | None = setting(
        None, f"Measure on servers of an engine, started in turn: {engine_names()}.", metavar="NAME"
    )
    command: Annotated[str | None, Field(exclude=True)] = setting(None, "Path of the engine's program.")
    gpus: int = setting(1, "Number of GPUs per server.", 1, 1024)
    servers: Sequence[Annotated[str, AfterValidator(address)]] = setting(
        (), "Server that runs; needed twice: without speculation, with it.", metavar="URL", flag="--server"
    )
    served_model: str | None = setting(None, "Name of the target on these servers.", metavar="NAME")

    @model_validator(mode="after")
    def _check_servers(self) -> Self:
        if self.servers and self.engine:
            raise ValueError("--engine and --server exclude each other; give one of them")
        if len(self.servers) == 1:
            raise ValueError("--server is needed twice: a server without speculation, then one with it")
        return self

    def kinds(self) -> dict[str, list[str]]:
        """Return the prompts by kind of work. Raises ValueError, one line, for an unknown kind and an unusable file."""
        prompts = OWN.get(self.target) or work_prompts()
        if self.prompt_file is not None:
            prompts = read_questions(self.prompt_file)
        names = list(filter(None, self.work.split(",")))
        if self.prompt.strip():
            own = kind_of_work("", self.prompt)
            own = own if own in prompts else YOURS
            others = [text for text in prompts.get(own, ()) if text != self.prompt]
            prompts = {own: [self.prompt, *others]} | {name: prompts[name] for name in prompts if name != own}
            names = [own if name == YOURS else name for name in names or [YOURS]]
        for name in names:
            if name not in prompts:
                raise ValueError(f"unknown kind of work {name[:40]!r}; {suggest(name[:40], prompts)}")
        return {name: [*texts] for name, texts in prompts.items() if name in (names or prompts)}

    def lanes(self, fits: Sequence[DrafterFit]) -> dict[str, Lane]:
        """Return the lanes to try, named, without draft lengths. fits: the drafters of the target."""
        tried = (fit for fit in fits if fit.fits is not False and (self.download or fit.place != ABSENT))
        readable = [fit for fit in tried if not (self.engine and fit.shares_text)]
        return lanes_to_try(self.target, self.drafts, readable)

    def run(self, report: Report, cancelled: Stop) -> Result:
        with closing(self.racer(cancelled)) as racer:
            search = Search({}, {}, racer.measure, 60.0 * self.minutes, serve=racer.serve)

            def progress(share: float, what: str) -> None:
                report(share, what, lambda: self._result(search, racer, [], running=True))

            kinds = self.kinds()
            enough = [name for name, texts in kinds.items() if self.confirm and len(texts) > CONFIRMED]
            held = {name: kinds[name][-CONFIRMED:] for name in enough}
            used = {name: texts[: -CONFIRMED if name in held else None] for name, texts in kinds.items()}
            confirm_s = search.seconds * CONFIRM_SHARE * bool(held)
            search.report, search.seconds = progress, search.seconds - confirm_s
            try:
                racer.load(progress)
                racer.fits = drafters_of(self.target)
                search.start()
                racer.follow(search)
                racer.measure_costs()
                search.families = racer.usable({} if self.servers else self.lanes(racer.fits), self.drafts)
                search.after = racer.after
                search.plan(used, racer.lane_s, alone=bool(self.prompt))
                racer.begin("racing")
            except (KeyboardInterrupt, Cancelled):
                return self._stopped(search, racer)
            search.run()
            if not any(work.samples for work in search.works):
                if search.stopped:
                    return self._stopped(search, racer)
                if racer.failure:
                    raise ValueError(racer.failure)
            again = search.confirm(held, confirm_s)
            if not search.stopped:
                racer.follow(again)
                again.run()
                search.stopped = again.stopped
            result = self._result(search, racer, [*_confirmed(search, again)])
            if result.rows and not search.stopped:
                self._keep(result)
            return result

    def _stopped(self, search: Search, racer: "Racer") -> Result:
        """Return the costs of passes, which are known before the first answer. Raises ValueError if they are not."""
        if not racer.pass_ms:
            raise ValueError("stopped before the first run was complete, so nothing was measured")
        search.stopped = True
        return self._result(search, racer, [])

    def _keep(self, result: Result) -> None:
        """Store the last result of a model on this machine, for the page; none of servers or of a user's prompts."""
        if self.engine or self.servers or self.prompt_file or YOURS in self.kinds() or self.target.embedded:
            return
        with suppress(OSError, ValueError, RuntimeError):
            file = _kept(self.target)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_result(shareable(result, [self.target, *self.drafts]), file)

    def racer(self, cancelled: Stop) -> "Racer":
        """Return what races the candidates. Raises ValueError, one line, for an unusable model or engine."""
        from specdemo.bench.racer import Racer, ServerRacer
        from specdemo.presets.serve import Program

        self.kinds()  # raises before anything is loaded
        new: dict[str, object] = {"id": self.name, "max_new_tokens": self.new_tokens, "temperature": 0.0}
        if not (self.servers or self.engine):
            context = {"context": MAX_CONTEXT} if self.target.gguf else {}
            base = pair(self.target, device=self.device, dtype=self.dtype)
            return Racer(base.changed(**new, **context), cancelled)
        allow(self.servers)
        program = Program.find(self.engine, self.command, self.gpus) if self.engine else None
        lookup = {"lanes": [{"method": LOOKUPS[0]}], "served_model": self.served_model}
        spec = preset(DEFAULT).changed(**new, **lookup, target=self.target, dtype=self.dtype, chat=None)
        return ServerRacer(spec, cancelled, program, self.servers)

    def _result(self, search: Search, racer: "Racer", confirmed: list[str], running: bool = False) -> Result:
        """Return what is measured. running: without a verdict, because the next races may change it."""
        works, best = [work for work in search.works if work.ranked()], search.leader()
        bars = [*_bars(search, racer, best, running)]
        if running:
            lead = f"Best so far: {best} with {search.mixed(best).format()}." if best else "No answer is measured yet."
            remarks = [lead, *racer.remarks()]
            return Result(self.name, 1, self.config(self.target), racer.environment(), bars, remarks)
        rows = [
            _row(work, name, racer.lanes[name], place) for work in works for place, name in enumerate(work.ranked())
        ]
        prompts = {work.name: work.prompts[0] for work in search.works}
        prompts[MIXED] = next(iter(prompts.values()), "")
        for row in filter(lambda row: row["place"], [*rows, *bars]):
            row[RACE_LINK] = racer.link(row["lane"], prompts[row["category"]])
        rows += bars
        remarks = [*_recommendation(search, best), *(_why_not(work) for work in works if not _pays(work))]
        remarks += [*confirmed, *racer.remarks(), *(["Stopped early."] if search.stopped and works else [])]
        rest = [work for work in search.works if not work.ranked()]
        unseen = {work.name: "no usable answer" if work.rounds else "no time" for work in rest}
        unseen |= dict.fromkeys(search.late, "no time")
        if search.stopped:
            unseen = dict.fromkeys(unseen if works else (), "stopped before it")
        reasons = {why: [name for name in unseen if unseen[name] == why] for why in unseen.values()}
        remarks += [f"Not measured: {', '.join(names[:9])}, {why}." for why, names in reasons.items()]
        if not any(map(_pays, works)) and (missing := [x.drafter for x in racer.fits if x.place == ABSENT]):
            remarks.append(f"Published drafters that are not here: {', '.join(missing[:4])}; download one to try it.")
        here = [fit for fit in racer.fits if fit.place not in PLACES]
        if not self.servers and here and not any(fit.fits for fit in here):
            remarks.append(f"On this machine: {in_words(here)}.")
        paying = sorted((work for work in works if _pays(work)), key=lambda work: work.value(work.ranked()[0]))
        if best and search.mixed(best).label == "faster":
            remarks += racer.settings(best)
        elif paying:
            remarks += [f"Settings for {paying[-1].name}:", *racer.settings(paying[-1].ranked()[0])]
        repeats = max((work.rounds for work in works), default=1)
        return Result(self.name, repeats, self.config(self.target), racer.environment(), rows, remarks, None)


def _kept(target: ModelRef) -> Path:
    return cache_folder() / "tuned" / f"{quote(target.link_name, safe='@')}.json"


def last_found(target: ModelRef, device: object) -> tuple[str, str] | None:
    """Return what the last `tune` of a model found on this machine, with its date, and the query of a link to its race;
    None if there is none. device: name of this machine's, as in results."""
    with suppress(ValueError, RuntimeError):  # no file, or no home
        result = read_result(_kept(target))
        leader = next((row["lane"] for row in result.rows if row.get("category") == MIXED), "")
        races = [row for row in result.rows if row.get(RACE_LINK)]
        best = max(races, key=lambda row: (row["lane"] == leader, row["speed-up"].value))
        if result.environment.get("device") == device:
            return f"{result.remarks[0]} (tune, {result.environment['date']})", best[RACE_LINK]
    return None


def best_rows(result: Result) -> Result:
    """Return a result of `tune` with the best row of every category; others unchanged."""
    if result.suite != Tune.name:
        return result
    best = [row for row in result.rows if row.get("place", 1) == 1]
    unshown = ("place", "state", RACE_LINK)
    return replace(result, rows=[{n: v for n, v in row.items() if n not in unshown} for row in best])


def _row(work: KindOfWork, name: str, lane: Lane, place: int) -> Row:
    runs, numbers = work.runs(name), _totals(work, name)
    return {
        "category": work.name,
        "lane": name,
        "k": lane.k or None,
        "speed-up": work.speed(name),
        "tokens/s": round(fmean(run.numbers["tokens_per_s"] or 0.0 for run in runs), 2),
        "accepted": numbers["acceptance_rate"],
        "tokens/pass": numbers["tokens_per_step"],
        "prompts": len(runs),
        "place": place + 1,
    }


def _bars(search: Search, racer: "Racer", best: str, running: bool) -> Iterator[Row]:
    """Yield a row per drafter: the best of its candidates with the speed-up over all kinds, in the order of the search,
    then drafters that did not race, and plain decoding. best: the candidate that is the first."""
    known, idle = list[tuple[str, Estimate, str]](), dict[str, str]()
    for drafter, family in search.families.items():
        ran = {name: races for name in family if (races := sum(len(work.runs(name)) for work in search.works))}
        current = next(filter(racer.so_far, family), "")
        name = max(ran, key=lambda name: (name == best, search.mean(name)), default=current)
        speed = search.mixed(name) if ran else racer.so_far(current)
        if speed is None:
            idle[drafter] = next((racer.notes[name] for name in family if name in racer.notes), "")
            continue
        out = search.serve is None and not any({*family} & {*work.racing} for work in search.works)
        state = "racing" if current else f"left out after {counted(ran[name], 'race')}" if out else ""
        known.append((name, speed, state))
    known.sort(key=lambda row: (row[0] == best, search.mean(row[0]) or row[1].value), reverse=True)
    for place, (name, speed, state) in enumerate(known, start=1 if best else 2):
        yield _bar(name, speed, place, state) | {"k": racer.lanes[name].k or None}
    for drafter, why in (idle | racer.left_out).items():
        why = why or ("stopped" if search.stopped else "no time" if not running else "")
        yield _bar(drafter, None, 0, f"not raced: {why}" if why else "waits")
    runs = [run for work in search.works for name, _, _ in known for run in work.runs(name)]
    rates = [run.numbers.get("tokens_per_s", 0.0) / run.speed for run in runs] or [racer.rates.get("", 0.0)]
    if rate := fmean(rates):
        yield _bar(PLAIN_DECODING, Estimate(1.0, 1.0, 1.0), 0, f"{rate:.3g} tokens/s")


def _bar(name: str, speed: Estimate | None, place: int, state: str) -> Row:
    return {"lane": name, "category": MIXED, "speed-up": speed, "place": place, "state": state}


def _totals(work: KindOfWork, name: str) -> dict[str, Any]:
    """Return counts and rates of a candidate over its runs, named as in the summary of a lane."""
    counts = ("tokens", "steps", "drafted", "accepted", "ms_draft", "ms_verify", "ms_other")
    total = {count: sum(run.numbers[count] or 0 for run in work.runs(name)) for count in counts}
    rates = {"acceptance_rate": ratio(total["accepted"], total["drafted"])}
    return total | rates | {"tokens_per_step": ratio(total["tokens"], total["steps"])}


def _pays(work: KindOfWork) -> bool:
    speed = work.speed(work.ranked()[0])
    return speed is not None and speed.label == "faster"


def _recommendation(search: Search, best: str) -> list[str]:
    if search.stopped and not any(work.ranked() for work in search.works):
        return ["Stopped before an answer was measured; the costs of passes are known."]
    if not any(work.ranked() for work in search.works):
        if search.rest <= 0.0:
            return ["The time was too short for an answer of each candidate; give it more minutes."]
        return ["Nothing could be measured: every answer failed or was too short; give other prompts or more tokens."]
    if not best:
        return ["No candidate was measured on every kind of work; give it more minutes."]
    speed, kinds = search.mixed(best), [work.name for work in search.works if work.ranked()]
    what = "mixed work" if len(kinds) > 1 else kinds[0]
    paying = [work.name for work in search.works if work.ranked() and _pays(work)]
    if speed.label == "faster":
        return [f"For {what} use {best}: {speed.format()} as fast as plain decoding."]
    if speed.low is None and (speed.value > 1.0 or not all(work.decided for work in search.works)):
        return [f"Undecided for {what}: the best so far is {best} with {speed.format()}; give it more minutes."]
    only = f"; speculation pays for {', '.join(paying)}, see the table" if paying else ""
    slow = f"no candidate is clearly faster, the best is {best} with {speed.format()}"
    return [f"For {what} decode plainly: {slow}{only}."]


def _why_not(work: KindOfWork) -> str:
    """Explain why nothing pays for a kind of work: what a step costs and yields, the acceptance that breaks even."""
    name = work.ranked()[0]
    speed, numbers = work.speed(name), _totals(work, name)
    start = "no clear gain, the best is" if speed and speed.low else "undecided, give more minutes; the best so far is"
    return f"{work.name}: {start} {name}. {explain(numbers, speed)}"


def _confirmed(search: Search, again: Search) -> Iterator[str]:
    """Yield what the two best of each kind did on other prompts, and whether their order held over all kinds."""
    ranked = {work.name: work.ranked() for work in search.works}
    speeds, ratios = list[list[float]](), list[list[float]]()
    for work in again.works:
        first, second = ranked[work.name][:2]
        if both := work.ratios(first, second):
            speeds.append([run.speed for run in work.runs(first)])
            ratios.append(both)
            yield (
                f"{work.name}: on {len(both)} other prompts {first} is {geometric_mean(speeds[-1]):.2f}x as fast as "
                f"plain decoding and {geometric_mean(both):.2f}x as fast as {second}."
            )
        else:
            yield f"{work.name}: not confirmed: {'no other prompt worked' if work.rounds else 'there was no time'}."
    if speeds:
        order = over_kinds(ratios)
        words = "both are about equally fast" if abs(order.value - 1.0) < EQUAL else "the order is open"
        words = {"faster": "the order held", "slower": "the order did not hold"}.get(order.label, words)
        yield (
            f"On {sum(map(len, ratios))} other prompts together the best are {over_kinds(speeds).format()} as fast as "
            f"plain decoding and {order.format()} as fast as the second ones; {words}."
        )
