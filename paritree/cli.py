"""paritree check ./libmyengine.so: the command line. Parses arguments and prints; every command's work is a function of campaigns or reports.

Heavy imports happen inside the commands, so that `paritree --help` answers at once. Exit codes: 0 clean, 1 findings, 2 usage, 3 the engine
could not be loaded, 4 internal error, 5 nothing verified, 130 interrupted; `replay --bisect`: 0, 1, 125.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CLEAN, FINDINGS, USAGE, NOT_LOADABLE, INTERNAL, NOTHING, SKIP, INTERRUPTED = 0, 1, 2, 3, 4, 5, 125, 130
DEFAULT_STORE = "paritree-out"
TRIALS = 10_000  # of a check, per engine
# options of a check that a certificate has no use for, with their values where nothing is given
NOT_CERTIFIED = {"trials": TRIALS, "budget": None, "report": None, "junit": "", "checkpoint": "", "preset": "", "stop_at_first": False}
CONFIG = "paritree.toml"
SETTINGS = {"store": str, "engines": list, "trials": int, "budget": str, "jobs": int, "seed": int, "hazards": bool, "report": str}

Options = argparse.Namespace


class UsageError(Exception):
    """A mistake of the user; the message says what was found, what is accepted and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded: at these sizes more threads are slower
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    words = list(sys.argv[1:] if arguments is None else arguments)
    began = time.monotonic()
    options: Options | None = None
    try:
        options = parser(settings()).parse_args(words)
        options.command_line, options.began = " ".join(["paritree", *words]), began
        run: Callable[[Options], int] = options.run
        return run(options)
    except UsageError as problem:
        return _failed(str(problem), USAGE, options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `| head` has what it wanted
        return CLEAN
    except KeyboardInterrupt:
        return _failed("interrupted; what was found is in the store", INTERRUPTED, options)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else USAGE
    except Exception as problem:
        code = _code_of(problem)
        if code == INTERNAL and (os.environ.get("PARITREE_DEBUG") or getattr(options, "debug", False)):
            raise
        text = (
            str(problem)
            if code != INTERNAL
            else f"internal error: {type(problem).__name__}: {problem}; run again with --debug for the traceback"
        )
        return _failed(text, SKIP if getattr(options, "bisect", False) is True else code, options)


def _code_of(problem: Exception) -> int:
    """By class name, so that no error class has to be imported for a command that did not fail."""
    names = {cls.__name__ for cls in type(problem).__mro__}
    if names & {"EngineLoadError", "NotLoadable", "UnknownEngine", "UnknownPlant", "NoCompiler", "BuildError"}:
        return NOT_LOADABLE
    if names & {
        "StoreError",
        "CapsuleError",
        "CaseError",
        "ConfigError",
        "UnknownRule",
        "Damaged",
        "WeightsKeyError",
        "CheckpointError",
        "WeightError",
    }:
        return USAGE
    return INTERNAL


def _failed(message: str, code: int, options: Options | None) -> int:
    if options is not None and getattr(options, "json", False):
        print(json.dumps({"error": message, "exit_code": code}))
    print(f"paritree: {message}", file=sys.stderr)
    return code


def settings() -> dict[str, Any]:
    """Defaults of ./paritree.toml, table [paritree]. Raises UsageError."""
    path = Path(CONFIG)
    if not path.is_file():
        return {}
    try:
        body = tomllib.loads(path.read_text("utf-8")).get("paritree", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as problem:
        raise UsageError(f"{path}: {problem}; repair it or move it away") from None
    for name, value in body.items():
        if name not in SETTINGS:
            raise UsageError(f"{path}: there is no setting {name!r}; there are {', '.join(SETTINGS)}")
        if not isinstance(value, SETTINGS[name]):
            raise UsageError(f"{path}: {name} is {value!r}, but must be of type {SETTINGS[name].__name__}")
    return dict(body)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def parser(defaults: dict[str, Any]) -> argparse.ArgumentParser:
    out = _Parser(prog="paritree", description="Differential verification of LLM inference engines against an executable specification.")
    out.add_argument("--version", action="store_true", help="print the version and end")
    out.set_defaults(run=_no_command(out))
    commands = out.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[[Options], int], summary: str, *, store: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.add_argument("--json", action="store_true", help="one JSON document on stdout, everything else on stderr")
        sub.add_argument("--debug", action="store_true", help="tracebacks for internal errors")
        if store:
            sub.add_argument(
                "--store", default=defaults.get("store", DEFAULT_STORE), metavar="DIR", help="folder of the store (%(default)s)"
            )
        sub.set_defaults(run=run)
        return sub

    def campaign(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--jobs", type=_positive, default=defaults.get("jobs"), help="shards (one per core)")
        sub.add_argument("--seed", type=int, default=defaults.get("seed", 0), help="of the campaign (%(default)s)")
        sub.add_argument("--report", default=defaults.get("report"), metavar="FILE.html", help="write the page afterwards")
        sub.add_argument("--junit", default="", metavar="FILE.xml", help="write JUnit XML afterwards")
        sub.add_argument(
            "--no-hazards", dest="hazards", action="store_false", default=defaults.get("hazards", True), help="friendly memory layouts only"
        )
        sub.add_argument("--checkpoint", default="", metavar="DIR", help="some sessions load this folder (config.json + safetensors)")
        sub.add_argument("--preset", default="", metavar="NAME", help="model configuration of the sessions (default: a mix)")
        sub.add_argument("--no-minimise", dest="minimise", action="store_false", help="report findings as they were met")
        sub.add_argument("--commit", default="", help="commit of the engine, for the report")

    sub = command("check", check, "is my engine right? operations, prefill, decode, tree verification, commit, whole loop")
    sub.add_argument("engines", nargs="*", default=defaults.get("engines", []), metavar="ENGINE", help="name, PATH.so or MODULE:CLASS")
    sub.add_argument("--trials", type=_positive, default=defaults.get("trials", TRIALS), help="per engine (%(default)s)")
    sub.add_argument("--budget", type=_budget, default=defaults.get("budget"), help="time or trials per engine: 90s, 30m, 2h, 5000")
    sub.add_argument("--stop-at-first", action="store_true", help="stop looking after the first finding")
    sub.add_argument(
        "--certify", type=_words, default=[], metavar="PROPERTY,...", help="instead of looking for defects: determinism, batch-invariance"
    )
    campaign(sub)

    sub = command("nightly", nightly, "replay known findings, then look for new ones; new, known, fixed, changed, flaky")
    sub.add_argument("engines", nargs="*", default=defaults.get("engines", []), metavar="ENGINE")
    sub.add_argument("--engine", dest="more", action="append", default=[], metavar="ENGINE", help="the same, as an option")
    sub.add_argument("--budget", type=_budget, default=defaults.get("budget", "30m"), help="time for everything (%(default)s)")
    campaign(sub)

    sub = command("judge", judge, "is this tensor right? one operation from a safetensors file", store=False)
    sub.add_argument("dump", help="safetensors file with inputs.NAME and outputs.NAME; with --battery also FINDING, capsule or case file")
    sub.add_argument("--battery", action="store_true", help="the same arrays under fixed rules in use elsewhere, beside our verdict")
    sub.add_argument("--engine", default="", help="with --battery: another engine than the recorded one")
    sub.add_argument(
        "--store", default=defaults.get("store", DEFAULT_STORE), metavar="DIR", help="with --battery: of the finding (%(default)s)"
    )
    sub.add_argument("--op", default="", help="operation (or metadata `op` of the file)")
    sub.add_argument("--profile", default="", help="declared arithmetic (float32-any-order)")
    sub.add_argument("--param", action="append", default=[], metavar="KEY=VALUE", help="parameter of the operation")

    def finding(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("finding", metavar="FINDING", help="id in the store, folder of a capsule, or case file")
        sub.add_argument("--engine", default="", help="another engine than the recorded one")

    sub = command("replay", replay, "run the case of a finding again")
    finding(sub)
    sub.add_argument("--attempts", type=_positive, default=3, help="each in a fresh process (%(default)s)")
    sub.add_argument("--bisect", action="store_true", help="for `git bisect run`: 0 good, 1 bad, 125 cannot be tested")

    sub = command("shrink", shrink, "make the case of a finding smaller")
    finding(sub)
    sub.add_argument("--seconds", type=_positive, default=60, help="at most (%(default)s)")
    sub.add_argument("--out", default="", metavar="DIR", help="write the capsule there")

    sub = command("bisect", bisect, "where does it diverge? guilty operation, layer and token; then the build")
    finding(sub)
    sub.add_argument(
        "--builds", nargs="+", default=[], metavar="ENGINE", help="engines from good to bad, oldest first: find the first bad one"
    )
    sub.add_argument("--hint", action="store_true", help="also which known defect gives the same wrong output; never a verdict")

    sub = command("report", report, "write the page of a store: one HTML file that opens offline")
    sub.add_argument("--out", default="", metavar="FILE.html", help="(STORE/report.html)")

    sub = command("merge", merge, "one store from several shards", store=False)
    sub.add_argument("stores", nargs="+", metavar="STORE")
    sub.add_argument("--into", required=True, metavar="STORE", help="a new folder")

    sub = command(
        "vectors", vectors, "no Python in my engine: golden vectors as plain files, and what an engine wrote for them", store=False
    )
    sub.add_argument("action", choices=["export", "check"], help="write a suite, or judge the outputs for one (docs/vectors.md)")
    sub.add_argument("folder", metavar="DIR", help="of the suite")
    sub.add_argument("--suite", default="small", help="export: which (%(default)s)")
    sub.add_argument("--outputs", default="", metavar="DIR", help="check: what the engine wrote (DIR/outputs)")
    sub.add_argument("--profile", default="", help="check: declared arithmetic (that of engine.json, or of the suite)")

    sub = command(
        "profile", profile, "propose the profile of an engine by probing its arithmetic, each line with how sure it is", store=False
    )
    sub.add_argument("action", choices=["measure"], help="ask the engine")
    sub.add_argument("engine", metavar="ENGINE", help="name, PATH.so or MODULE:CLASS")

    sub = command("engines", engines, "known engines, and what they offer", store=False)
    sub.add_argument("names", nargs="*", metavar="ENGINE", help="describe these")

    sub = command(
        "tree-profile", tree_profile, "which draft tree does my engine build, and what does it lose against the paper's?", store=False
    )
    sub.add_argument("engine", metavar="ENGINE", help="name, PATH.so or MODULE:CLASS")
    sub.add_argument("--repeats", type=_positive, default=2, help="seeds per size and kind of draft logits (%(default)s)")

    sub = command("explain", explain, "a rule by its id: statement, example, source", store=False)
    sub.add_argument("rules", nargs="*", metavar="RULE", help="T3, K1, M8, ...; none: all of them")

    command("doctor", doctor, "is this machine fit? Python, compiler, cache, shared memory", store=False)
    return out


def _no_command(out: argparse.ArgumentParser) -> Callable[[Options], int]:
    def run(options: Options) -> int:
        if options.version:
            import paritree

            print(paritree.__version__)
            return CLEAN
        out.print_help()
        return USAGE

    return run


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def _words(text: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return words


def _budget(text: str) -> str:
    budget_of(text)
    return text


def budget_of(text: str) -> tuple[float | None, int | None]:
    """(seconds, trials) of 90s, 30m, 2h, 1d or a number of trials."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no budget: give 90s, 30m, 2h, or a number of trials")
    if found[2]:
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]], None
    return None, int(float(found[1]))


# ---- campaigns -----------------------------------------------------------------------------------------------------------------------


def _campaign_options(options: Options) -> Any:
    from campaigns import runner

    for name in ("report", "junit"):
        _checked_file(name, getattr(options, name))
    seconds, trials = budget_of(options.budget) if options.budget else (None, None)
    return runner.Options(
        store=options.store, trials=trials or (10**9 if seconds else int(getattr(options, "trials", runner.TRIALS))), seconds=seconds, jobs=options.jobs,
        seed=options.seed, hazards=options.hazards, checkpoint=_checked_checkpoint(options.checkpoint),
        preset=_checked_preset(options.preset), minimise=options.minimise, stop_at_first=getattr(options, "stop_at_first", False),
        command=options.command_line, budget=options.budget or "", commit=options.commit,
    )  # fmt: skip


def _checked_checkpoint(folder: str) -> str:
    """The absolute folder, every tensor read once, so that a fault is one message before anything runs."""
    if not folder:
        return ""
    from campaigns.weights import checkpoint_at, weights_for
    from spec.script import WeightsKey

    absolute = str(Path(folder).resolve())
    weights_for(checkpoint_at(absolute).config, WeightsKey(0, checkpoint=absolute))
    return absolute


def _checked_file(option: str, path: str | None) -> None:
    """A file that is written at the end: what would keep it from being written is said before anything runs. Raises UsageError."""
    if not path:
        return
    folder = Path(path).resolve().parent
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if Path(path).is_dir() or not there.is_dir() or not os.access(there, os.W_OK):
        found = "a folder" if Path(path).is_dir() else f"{there} cannot be written" if there.is_dir() else f"{there} is a file"
        raise UsageError(f"--{option} {path}: {found}: name a file in a folder that can be written")


def _checked_preset(name: str) -> str:
    if name:
        from spec.config import preset

        preset(name)  # ConfigError lists the names
    return name


def check(options: Options) -> int:
    from campaigns import runner
    from paritree import console

    if not options.engines:
        raise UsageError("check needs an engine: a name (`paritree engines`), PATH.so or MODULE:CLASS")
    if options.certify:
        return certify(options)
    log = console.Log(quiet=options.json)
    run_id, results = runner.check(options.engines, _campaign_options(options), log.progress)
    log.end()
    page = _page(options)
    code = console.exit_code(results)
    if options.json:
        print(json.dumps({"run_id": run_id, "exit_code": code, "report": page, "engines": [result.plain() for result in results]}))
    else:
        for result in results:
            print(console.ladder(result, _other_store(options)))
        if page:
            print(f"report: {page}")
    return code


def certify(options: Options) -> int:
    """Raises UsageError for options of a campaign: a certificate has sessions of its own, and leaves nothing in a store."""
    from campaigns import certify as certify_module
    from campaigns.isolation import Supervisor
    from campaigns.trial import patience
    from paritree import console

    given = settings()
    stray = [name for name, usual in NOT_CERTIFIED.items() if getattr(options, name) != given.get(name, usual)]
    if stray:
        raise UsageError(
            f"--{stray[0].replace('_', '-')} has no meaning beside --certify, which tries sessions of its own and keeps no findings"
        )
    body = []
    for engine in options.engines:
        with Supervisor(engine, deadline_s=patience()) as supervisor:
            certificates = certify_module.certify(supervisor, options.certify, seed=options.seed)
        body.append({"engine": engine, "certificates": [certificate.plain() for certificate in certificates]})
        if not options.json:
            print(console.certificates(engine, certificates))
    code = CLEAN if all(c["holds"] for one in body for c in one["certificates"]) else FINDINGS
    if options.json:
        print(json.dumps({"exit_code": code, "engines": body}))
    return code


def nightly(options: Options) -> int:
    import dataclasses

    from campaigns import nightly as night_module
    from paritree import console

    names = list(dict.fromkeys([*options.engines, *options.more]))
    if not names:
        raise UsageError("nightly needs an engine: --engine NAME, PATH.so or MODULE:CLASS")
    seconds, _ = budget_of(options.budget)
    if seconds is None:
        raise UsageError(f"--budget {options.budget}: nightly shares out time: give 30m or 2h")
    log = console.Log(quiet=options.json)
    campaign = dataclasses.replace(_campaign_options(options), purpose="nightly")
    # The budget is for everything that the user waits for: what was loaded until here, and the page
    left = seconds - (time.monotonic() - options.began) - (night_module.PAGE_S if options.report else 0.0)
    night = night_module.nightly(names, campaign, left, log.progress)
    log.end()
    page = _page(options)
    verified = any(result.verified for result in night.results)
    missing = any(result.not_loaded for result in night.results)
    code = FINDINGS if night.failing else NOT_LOADABLE if missing else CLEAN if verified else NOTHING
    if options.json:
        groups = {status: [row["finding_id"] for row in rows] for status, rows in night.by_status().items()}
        engines_ = [result.plain() for result in night.results]
        print(
            json.dumps(
                {
                    "run_id": night.run_id,
                    "exit_code": code,
                    "report": page,
                    "findings": groups,
                    "accepted": sorted(night.accepted),
                    "not_replayed": sorted(night.waiting),
                    "seed": night.seed,
                    "engines": engines_,
                    "sample": [dataclasses.asdict(score) for score in night.sample],
                }
            )
        )
    else:
        print(console.night(night, _other_store(options)))
        if page:
            print(f"report: {page}")
    return code


def _other_store(options: Options) -> str:
    return "" if options.store == DEFAULT_STORE else str(options.store)


def _page(options: Options) -> str:
    """The page, JUnit XML and, inside a GitHub job, its summary; the path of the page."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
    if options.junit or summary:
        from reports import summaries

        data = summaries.page_of(options.store)
        if options.junit:
            summaries.write_text(options.junit, summaries.junit(data))
        if summary:
            summaries.write_text(summary, summaries.github_summary(data), append=True)
    if not options.report:
        return ""
    from reports.page import write_report

    return str(write_report(options.store, options.report))


def report(options: Options) -> int:
    from reports.page import write_report

    out = write_report(options.store, options.out or Path(options.store) / "report.html")
    print(json.dumps({"report": str(out)}) if options.json else out)
    return CLEAN


def merge(options: Options) -> int:
    from reports.merge import merge as united

    with united(options.stores, options.into) as store:
        count = len(store.findings())
    print(json.dumps({"store": options.into, "findings": count}) if options.json else f"{options.into}: {count} findings")
    return CLEAN


# ---- one case ------------------------------------------------------------------------------------------------------------------------


def judge(options: Options) -> int:
    from campaigns import recorded
    from paritree import console

    given: dict[str, int | float] = {}
    for pair in options.param:
        key, equals, value = pair.partition("=")
        try:
            given[key] = int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
        except ValueError:
            raise UsageError(f"--param {pair}: give KEY=NUMBER") from None
        if not equals:
            raise UsageError(f"--param {pair}: give KEY=NUMBER")
    if options.battery:
        return _battery(options, given)
    case, inputs, outputs, profile = recorded.read_dump(Path(options.dump), options.op, given)
    judgements = recorded.judged(case.op, inputs, outputs, profile=options.profile or profile, params=dict(case.params))
    return console.print_judgements(judgements, as_json=options.json)


def _battery(options: Options, given: dict[str, int | float]) -> int:
    """A dump, a finding, a capsule or a case: our verdict, and what fixed rules say of the same arrays."""
    from campaigns import battery, recorded
    from campaigns.case import CaseError
    from campaigns.isolation import Supervisor
    from campaigns.trial import Bench, patience
    from paritree import console

    of_dump = options.dump.endswith(".safetensors")
    stray = (
        [flag for flag, value in {"--engine": options.engine}.items() if value]
        if of_dump
        else [flag for flag, value in {"--op": options.op, "--profile": options.profile, "--param": given}.items() if value]
    )
    if stray:
        what = "a dump holds its outputs, no engine is run" if of_dump else "a case names its operation, and its engine the profile"
        raise UsageError(f"{options.dump}: {stray[0]} has no meaning here: {what}")
    if of_dump:
        case, inputs, outputs, profile = recorded.read_dump(Path(options.dump), options.op, given)
        params = dict(case.params)
        judgements = recorded.judged(case.op, inputs, outputs, profile=options.profile or profile, params=params)
        compared = battery.recorded(case.op, params, inputs, outputs)
    else:
        options.finding = options.dump
        try:
            stored, engine = _stored(options)
        except CaseError as problem:
            text = str(problem)
            where = "" if text.startswith(options.dump) else f"{options.dump}: "
            raise UsageError(
                f"{where}{text} (--battery takes a case file, a finding, a capsule or a dump that ends in .safetensors)"
            ) from None
        with Supervisor(engine, deadline_s=patience()) as supervisor:
            judgements, compared = battery.beside(Bench(supervisor), stored.case)
    return console.print_battery(judgements, compared, as_json=options.json)


def _stored(options: Options) -> tuple[Any, str]:
    """(stored case, engine)."""
    from campaigns import replay as replay_module

    stored = replay_module.stored(options.finding, options.store)
    engine = options.engine or stored.engine_spec
    if not engine:
        raise UsageError(f"{options.finding} does not say which engine it is about: give --engine")
    return stored, engine


def replay(options: Options) -> int:
    from campaigns import replay as replay_module
    from campaigns.isolation import Supervisor
    from campaigns.trial import patience
    from paritree import console

    stored, engine = _stored(options)
    with Supervisor(engine, deadline_s=patience()) as supervisor:
        result = replay_module.replayed(supervisor, stored.case, stored.wanted, options.attempts, earlier=stored.earlier)
    fails = result.reproduced > 0 or (result.changed and not options.bisect)
    code = FINDINGS if fails else CLEAN
    if options.json:
        body = {
            "finding": options.finding,
            "engine": engine,
            "status": result.status,
            "reproduced": result.reproduced,
            "attempts": result.attempts,
        }
        print(json.dumps(body | {"exit_code": code, "judgements": console.plain_judgements(result.outcome.judgements)}))
    else:
        print(f"{options.finding}: {result.status}, failed again in {result.reproduced} of {result.attempts} replays")
        worst = result.outcome.worst
        if worst is not None and worst.message:
            print(f"  {worst.verdict}: {worst.message}")
    return code


def shrink(options: Options) -> int:
    from campaigns import capsule, fingerprint, minimise
    from campaigns.case import to_json
    from campaigns.isolation import Supervisor
    from campaigns.trial import Bench, patience

    stored, engine = _stored(options)
    with Supervisor(engine, deadline_s=patience()) as supervisor:
        name = supervisor.description.name
        bench = Bench(supervisor)
        for earlier in stored.earlier:
            bench.outcome(earlier)
        found = fingerprint.first(name, list(bench.outcome(stored.case).judgements))
        if found is None:
            print(
                json.dumps({"status": "passes"}) if options.json else f"{options.finding}: passes on {engine}, there is nothing to shrink"
            )
            return CLEAN
    smallest = minimise.minimum(engine, stored.case, found[0], earlier=stored.earlier, seconds=options.seconds)
    if smallest is None:
        print(
            json.dumps({"status": "flaky"})
            if options.json
            else f"{options.finding}: did not fail again; it is flaky or needs what ran before"
        )
        return FINDINGS
    line = to_json(smallest.case)
    if options.out:
        with Supervisor(engine, deadline_s=patience()) as supervisor:
            capsule.write(
                Path(options.out),
                engine,
                Bench(supervisor),
                smallest.case,
                smallest.judgement,
                finding_id=stored.finding_id or Path(options.out).name,
                earlier=smallest.earlier,
                runs=smallest.runs,
            )
    if options.json:
        print(
            json.dumps(
                {
                    "status": "smaller",
                    "case": json.loads(line),
                    "nodes": smallest.nodes,
                    "history": [json.loads(to_json(earlier)) for earlier in smallest.earlier],
                    "checks": smallest.checks,
                    "out": options.out,
                }
            )
        )
    else:
        for earlier in smallest.earlier:
            print(f"after: {capsule.in_words(earlier)}")
        print(f"{capsule.in_words(smallest.case)}\n  {smallest.judgement.message}\n  after {smallest.checks} runs of the engine\n{line}")
        if options.out:
            print(f"capsule: {options.out}")
    return FINDINGS


def bisect(options: Options) -> int:
    from campaigns import bisect as bisect_module
    from campaigns.isolation import Supervisor
    from campaigns.trial import Bench, patience
    from paritree import console

    if options.builds and not options.engine:
        options.engine = options.builds[-1]
    stored, engine = _stored(options)
    with Supervisor(engine, deadline_s=patience()) as supervisor:
        location = bisect_module.located(Bench(supervisor), stored.case)
        hint = _hint(Bench(supervisor), stored.case) if options.hint and location is not None else None
    first_bad = bisect_module.first_bad(options.builds, stored.case, stored.wanted) if options.builds else None
    if location is None:
        print(json.dumps({"status": "passes"}) if options.json else f"{options.finding}: passes on {engine}")
        return CLEAN
    if options.json:
        print(
            json.dumps(
                bisect_module.bisect_column(location)
                | {"stations": bisect_module.trace_column(location), "first_bad_build": first_bad, "hint": hint}
            )
        )
    else:
        print(console.location(location))
        if hint is not None:
            print(f"hint (no verdict): {hint}")
        if first_bad is not None:
            print(f"first bad build: {first_bad}")
    return FINDINGS


def _hint(bench: Any, case: Any) -> str:
    from campaigns import hint

    return hint.hint(bench, case, hint.library()).text


# ---- vectors and profiles --------------------------------------------------------------------------------------------------------------


def vectors(options: Options) -> int:
    from campaigns import vectors as suite_module
    from campaigns import vectors_check
    from paritree import console

    folder = Path(options.folder)
    if options.action == "export":
        manifest = suite_module.export(folder, options.suite)
        body = {"folder": str(folder), "suite": manifest["suite"], "vectors": len(manifest["vectors"]), "hash": manifest["hash"]}
        print(json.dumps(body) if options.json else f"{folder}: {body['vectors']} vectors of suite {body['suite']}, hash {body['hash']}")
        return CLEAN
    author, checked = vectors_check.check(folder, Path(options.outputs) if options.outputs else None, options.profile)
    return console.print_vectors(author.description, checked, as_json=options.json)


def profile(options: Options) -> int:
    from campaigns import measure as measure_module
    from campaigns.isolation import Supervisor
    from campaigns.trial import patience
    from paritree import console

    with Supervisor(options.engine, deadline_s=patience(), weights=measure_module.WEIGHTS) as supervisor:
        measured = measure_module.measure(supervisor)
    return console.print_measured(measured, as_json=options.json)


# ---- about -----------------------------------------------------------------------------------------------------------------------------


def engines(options: Options) -> int:
    from campaigns.about import engine_facts
    from impls.registry import FORMS, known_engines

    if not options.names:
        names = known_engines()
        print(json.dumps({"engines": list(names)}) if options.json else "\n".join([*names, "", f"other forms: {FORMS}"]))
        return CLEAN
    facts = [engine_facts(name) for name in options.names]
    if options.json:
        print(json.dumps({"engines": facts}))
    else:
        for fact in facts:
            print(
                "\n".join(f"{key:13} {', '.join(value) if isinstance(value, list) else value}" for key, value in fact.items()), end="\n\n"
            )
    return CLEAN


def tree_profile(options: Options) -> int:
    from campaigns.tree_profile import tree_profile as asked
    from paritree import console

    report = asked(options.engine, options.repeats)
    finding = report.finding
    if finding is None:
        code = NOTHING
    else:
        code = CLEAN if finding.departure is None and not report.problems else FINDINGS
    body = console.plain_tree_profile(report) | {"exit_code": code}
    print(json.dumps(body) if options.json else console.tree_profile(report))
    return code


def explain(options: Options) -> int:
    from spec.rules import RULES, rule

    found = [rule(name) for name in options.rules] if options.rules else list(RULES.values())
    if options.json:
        print(json.dumps([{"id": r.id, "statement": r.statement, "example": r.example, "source": r.source} for r in found]))
    elif options.rules:
        for r in found:
            print(f"{r.id}  {r.statement}\n\n  example  {r.example}\n  source   {r.source}\n")
    else:
        print("\n".join(f"{r.id:4} {r.statement}" for r in found))
    return CLEAN


def doctor(options: Options) -> int:
    from campaigns.about import machine_facts

    facts = machine_facts()
    if options.json:
        print(json.dumps({"facts": facts}))
    else:
        for fact in facts:
            print(
                f"{'ok ' if fact['ok'] else 'BAD'} {fact['name']:22} {fact['found']}"
                + (f"\n      {fact['advice']}" if not fact["ok"] else "")
            )
    return CLEAN if all(fact["ok"] for fact in facts) else FINDINGS


if __name__ == "__main__":
    sys.exit(main())
