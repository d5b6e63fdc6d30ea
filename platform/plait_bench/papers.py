"""`plait bench --papers`: runs the files for all figures of the papers, and shows where each stands.

Each file runs in a process of its own. What a file gave is kept in papers.jsonl with a digest of what it was
made from, so that the same command resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from runpy import run_module
from tempfile import TemporaryDirectory
from time import process_time, time
from typing import Any

import yaml

import plait
from plait.config.fields import build
from plait.core.settings import TrackingSettings
from plait.tracking.connection import open_store
from plait.tracking.location import locate
from plait.tracking.records import LogPoints
from plait.utils.benchmarks import PAPERS, RUNNERS
from plait.utils.durations import duration
from plait.utils.files import write_text
from plait.utils.paths import conf_dir, sweeps_dir, user_path
from plait_bench.inputs import lacks
from plait_bench.papers_page import as_html, as_markdown, summary
from plait_bench.register import MODULES
from plait_bench.run import Paper

FOLDER = "papers"  # below tracking.root
PLAIT = Path(plait.__file__).parent
EXPERIMENT = "plait papers"
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_. -]")  # characters that MLflow refuses
LIMIT = 3600.0  # seconds after which a file has failed
OUT, ERR, SECONDS = "out", "err", "seconds"  # files of a process that runs one
Record = dict[str, Any]  # of a file: name, digest, paper, state ("ran", "failed", "needs"), seconds, report


@dataclass(frozen=True, slots=True)
class PaperFile:
    """A file of sweeps/ for a paper's figures."""

    name: str
    paper: Paper
    digest: str
    needs: str = ""  # as bench.needs


def paper_files(folder: Path) -> list[PaperFile]:
    """All of them, by name; the digest covers the file, the clusters, the benchmarks' data and Plait's code:
    a planner or simulator that has changed would give other figures."""
    own = Path(__file__).parent
    code = (path for package in (own, PLAIT) for path in sorted(package.rglob("*.py")))
    data = (path for path in sorted((own / "data").iterdir()) if path.is_file())
    sources = [*sorted((conf_dir() / "cluster").glob("*.yaml")), *data, *code]
    shared = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).digest()
    found = []
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_bytes()
        content = yaml.safe_load(text)
        paper = build(Paper, content.get("paper") or {}, "paper")
        if paper.name:
            name = path.relative_to(folder).with_suffix("").as_posix()
            digest = hashlib.sha256(shared + text).hexdigest()[:16]
            found.append(PaperFile(name, paper, digest, content["bench"].get("needs", "")))
    return found


@RUNNERS.register(PAPERS)
def run_papers(root: str, flags: Mapping[str, str]) -> None:
    """Run what has not run, then write papers.html and papers.md, record runs in MLflow and print the table.

    Args:
        root: folder of Plait's files, as tracking.root.
        flags: --json prints all reports for programs.
    """
    folder = user_path(root) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    records = list(every(paper_files(sweeps_dir()), folder / "papers.jsonl"))
    write_text(folder / "papers.md", as_markdown(records))
    write_text(folder / "papers.html", as_html(records))
    record_runs(root, records)
    print(json.dumps(records, indent=2) if "--json" in flags else as_markdown(records))
    print(f"{folder / 'papers.html'}: {summary(records)}", file=sys.stderr)


def every(files: Sequence[PaperFile], log: Path) -> Iterator[Record]:
    """The record of each file: the kept one if nothing has changed, otherwise that of a run now. What needs a
    device is not kept: it may be there the next time."""
    kept = {(each["name"], each["digest"]): each for each in read_records(log) if each["state"] == "ran"}
    begun = time()
    for number, file in enumerate(files, start=1):
        record = kept.get((file.name, file.digest))
        if record is None:
            spent = duration(time() - begun)
            print(f"{spent:>10}  {number} of {len(files)}: {file.name}", file=sys.stderr, flush=True)
            record = run_file(file)
            if record["state"] != "needs":
                with log.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
        yield record


def read_records(log: Path) -> list[Record]:
    """The lines of a log; one that an interruption left incomplete is left out."""
    records = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def run_file(file: PaperFile) -> Record:
    """Run one file in a process of its own."""
    record: Record = {"name": file.name, "digest": file.digest, "paper": asdict(file.paper), "seconds": 0.0}
    if lacks(file.needs, "auto"):
        return record | {"state": "needs", "needs": file.needs, "report": None}
    began = time()
    with TemporaryDirectory() as folder:
        streams = Path(folder)
        process = _processes().Process(target=_bench, args=(file.name, streams, Path.cwd()))
        process.start()
        process.join(LIMIT)
        overdue = process.is_alive()
        if overdue:
            process.kill()
            process.join()
        record["seconds"] = time() - began
        if process.exitcode:
            error = f"more than {duration(LIMIT)}" if overdue else _last_words(streams, process.exitcode)
            return record | {"state": "failed", "report": None, "error": error}
        record["processor_seconds"] = float((streams / SECONDS).read_text())
        return record | {"state": "ran", "report": json.loads((streams / OUT).read_text())}


def _last_words(streams: Path, exitcode: int) -> str:
    """What a process that failed said; one that was killed may have said nothing."""
    text = (streams / ERR).read_text()[-2000:].strip() if (streams / ERR).exists() else ""
    return text if exitcode > 0 and text else f"{text}\nended with {exitcode}".strip()


def _processes() -> ForkServerContext:
    """Where processes start from one that has imported what benchmarks need."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["plait.cli.main", *(f"plait_bench.{module}" for module in MODULES)])
    return context


def _bench(name: str, streams: Path, folder: Path) -> None:
    """In a process of its own: `plait bench NAME --json`, with both streams and the processor seconds in
    files."""
    os.chdir(folder)
    for number, stream in ((1, OUT), (2, ERR)):
        descriptor = os.open(streams / stream, os.O_CREAT | os.O_WRONLY)
        os.dup2(descriptor, number)
    sys.argv = ["plait", "bench", name, "--json"]
    try:
        run_module("plait", run_name="__main__")
    finally:
        (streams / SECONDS).write_text(str(process_time()))


def record_runs(root: str, records: Sequence[Record]) -> None:
    """One MLflow run for each file that ran: ours and what is published, by figure."""
    tracking = TrackingSettings(root=user_path(root), experiment=EXPERIMENT)
    store = open_store(locate(tracking), tracking.experiment)
    now = int(1e3 * time())
    for record in records:
        if record["state"] != "ran":
            continue
        tags = {"plait.papers.file": record["name"], "plait.papers.digest": record["digest"]}
        filters = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        if store.client.search_runs([store.experiment_id], filters):
            continue
        run = store.create_run(record["name"], tags, now)
        store.update(run, [LogPoints(run, 0, now, metrics(record["report"]["figures"]))], {})
        store.set_status(run, "FINISHED", now)


def metrics(figures: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Ours and the published value of each figure, under names that MLflow takes."""
    found = {}
    for figure in figures:
        name = NOT_IN_NAMES.sub("_", figure["name"])
        if figure["ours"] is not None:
            found[f"ours/{name}"] = float(figure["ours"])
        if figure["target"] and figure["target"]["kind"] == "published":
            found[f"published/{name}"] = float(figure["target"]["value"])
    return found
