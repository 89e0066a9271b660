"""Flower's ServerApp: the server of a federation whose sites keep their images.

It does what the simulator's server does, by the same class, sends one message per site and round, and leaves an
ordinary run folder. A site that fails, answers too late or sends something unusable is left out of the round and named
in its record.
"""

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from feddure import environment, experiments
from feddure.config import Experiment
from feddure.data.dataset import Dataset
from feddure.errors import ConfigError, FeddureError, RunError
from feddure.files import write_json, write_whole
from feddure.flower.app import inflation, limits, messages, run_config, site_data
from feddure.flower.app.audit import AuditLog, describe_arrays
from feddure.flower.app.ledger import epsilon_of
from feddure.flower.app.messages import TASK, TRAIN, Task
from feddure.flower.app.nodes import ConnectedSites, PendingMessages, read_reply
from feddure.flower.app.policy import MOST_IMAGES, run_hash
from feddure.flower.app.registry import Registry
from feddure.flower.app.run_config import RunOptions
from feddure.flower.app.sanitize import log, one_line
from feddure.methods.base import State
from feddure.reports.run_report import write_report
from feddure.simulation import checkpoint, runs
from feddure.simulation.dp import DELTA
from feddure.simulation.engine import Engine
from feddure.simulation.server import Answer, Assignment, ImageCounts, Server, capped, resolve_unlabelled_batch
from feddure.tracking import records
from feddure.tracking.metrics import TITLES
from feddure.tracking.summary import evaluations, percent
from feddure.tracking.tensorboard import TensorBoard

app = ServerApp()

_MOST_UNLABELLED = 4096  # in a step, where nobody said how many
_MOST_EMPTY_ROUNDS = 5
_LARGEST = 1e30  # that a site may report; sums of such numbers stay finite
_LARGEST_MEAN = 1e6  # of a round's steps: one site must not drown the others' losses
_MOST_MEANS = 32
_MEAN = re.compile(r"train\.[A-Za-z][A-Za-z0-9_]{0,39}")
_TESTS = {"accuracy": 1.0, "loss": _LARGEST, "images": MOST_IMAGES}
"""What a site reports of a test, and the largest that it can be."""
_KEPT_CHECKPOINTS = 3


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that the run's configuration asks for."""
    try:
        run(grid, run_config.read(context.run_config), context.run_id)
    except FeddureError as problem:
        log(f"problem: {problem}")
        raise


def run(grid: Grid, options: RunOptions, run_id: int) -> Server:
    """All rounds of a run, from the first or from the last checkpoint; returns the server after the last.

    `run_id` is Flower's, another one at each start.
    """
    inflation.guard(options.timeout_seconds)
    options = run_config.as_resumed(options)
    folder = options.folder
    runs.expect_unlocked(folder)
    runs.check_folder(options.experiment, folder, options.resume)
    dataset = _dataset(options)
    log(f"sites approve this run as {run_hash(_for_sites(options.experiment), run_id)}")
    sites = _gather(grid, options)
    server = _make_server(options, dataset, sites, FederationFile(folder).image_counts)
    if options.protection.noise and server.state["statistics"].numel():
        raise ConfigError("--dp-noise: batch-norm statistics cannot be made private; add --set norm=group")
    with runs.lock(folder):
        # A server that worked here while this one waited for sites may have left a run.
        runs.check_folder(options.experiment, folder, options.resume)
        checkpoint.read(server, folder, options.round or None)
        _write_start(server, folder)
        log(f"run folder: {folder.resolve()}")
        if server.method.relays_uploads:
            log(f"{server.experiment.method} sends a site's parameters to other sites as helpers")
        if note := server.note():
            log(note)
        if server.round:
            log(f"going on after round {server.round}")
        with runs.noting_failure(folder):
            with ExitStack() as closing:
                Rounds(grid, options, server, sites, closing).run_all()
            runs.write_models(server, folder)
            log(f"report: {write_report([folder], folder / runs.REPORT_FILE)}")
    return server


class FederationFile:
    """federation.json of a run: its own name, and what sites said of themselves, also those that are away now."""

    def __init__(self, folder: Path):
        self._path = folder / records.FEDERATION
        try:
            self._written = json.loads(self._path.read_bytes()) if self._path.exists() else {}
            self.run_name = self._written.get("run") or secrets.token_hex(8)
            self._sites = {site["client"]: site for site in self._written.get("sites", [])}
            self.image_counts = {  # of every client that ever took part in the run
                client: ImageCounts(site["labelled"], site["unlabelled"]) for client, site in self._sites.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise RunError(f"{self._path}: cannot be read ({problem}); restore it from a copy") from None

    def write(self, classes: Sequence[str], names: Sequence[str], sites: Sequence[dict[str, Any]]) -> None:
        """Remember what the present sites said; `names` are those of all sites of the federation."""
        self._sites |= {site["client"]: site for site in sites}
        known = [self._sites[client] for client in sorted(self._sites)]
        content = {"run": self.run_name, "classes": list(classes), "names": list(names), "sites": known}
        if content != self._written:
            write_json(self._path, content, RunError)
            self._written = content


class Rounds:
    """The rounds of a run, one after the other."""

    def __init__(self, grid: Grid, options: RunOptions, server: Server, sites: ConnectedSites, closing: ExitStack):
        self._pending = PendingMessages(grid)
        self._options = options
        self._server = server
        self._sites = sites
        self._file = FederationFile(options.folder)
        self._recorder = records.Recorder(options.folder, server.round)
        self._board = TensorBoard(options.folder, server.dataset.classes)
        closing.callback(self._recorder.close)
        closing.callback(self._board.close)
        self._shapes = messages.upload_shapes(server.program)
        self._audit = AuditLog(options.server_folder)
        self._head = ""  # hash of the last entry
        self._exchanged: dict[int, dict[str, Any]] = {}  # by client, what was sent and received in the round
        self._most_bytes = limits.upload_bytes(messages.shape_bytes(self._shapes))
        inflation.allow(self._most_bytes)
        self._experiment = _for_sites(server.experiment)
        self._checkpointed = _remembered(server)
        self._left_out: dict[int, str] = {}  # client → the reason that it has not been told yet
        self._capped: set[int] = set()  # clients whose weight was cut, as the operator knows
        before = records.read(options.folder / records.METRICS)
        used = [len(record["clients"]) > len(record["left_out"]) for record in before]
        self._empty_rounds = len(used) - max((n for n, some in enumerate(used, 1) if some), default=0)  # up to now
        tested = [(score, number) for number, score in evaluations(before, server.experiment.metric)]
        self._best = max(tested, default=(0.0, 0))  # by the metric, and its round

    def run_all(self) -> None:
        """All rounds that are left; the audit log knows how they ended."""
        server, about = self._server, {"run": self._file.run_name}
        fingerprint = experiments.fingerprint(server.experiment)
        self._head = self._audit.write(
            "run begins", **about, after_round=server.round, method=server.experiment.method, experiment=fingerprint
        )
        try:
            while server.round < server.experiment.rounds:
                self.run_next()
            self.expect_learned()
        except BaseException as problem:
            self._audit.write("run ends early", **about, round=server.round, why=one_line(problem or type(problem)))
            raise
        self._audit.write("run ends", **about, round=server.round)

    def run_next(self) -> None:
        """The next round: ask its sites, make the next model of their answers, test it, write it down."""
        began = time.perf_counter()
        server, sites = self._server, self._sites
        sites.wait(max(self._options.minimum_sites, 1), self._options.wait_seconds)
        assignments = self._draw()
        if assignments and sites.wait_for_any(
            [assignment.client for assignment in assignments], self._options.timeout_seconds
        ):
            assignments = self._draw()  # those that came meanwhile may have other images than before
        self._file.write(server.dataset.classes, self._options.description.sites, sites.describe())
        if self._options.server_folder is not None:
            limits.tell_proxy(self._options.server_folder, self._file.run_name, server.round + 1, self._most_bytes)
        answers, reports, traffic = self._ask(assignments)
        record, problems = server.finish_round(answers)
        for client, problem in problems.items():
            log(f"round {server.round}: site '{sites.name(client)}' is left out: {problem}")
            self._left_out[client] = f"round {server.round}: {problem}"
        for client, why in record.get("suspicious", {}).items():
            log(f"round {server.round}: site '{sites.name(int(client))}' is suspicious: {why}")
        used = [answer for answer in answers if answer.client not in problems]
        self._note_capped([answer.client for answer in used])
        self._write_audit(answers, problems, record.get("suspicious", {}))
        if server.method.memory:
            server.memories |= {answer.client: {"round": torch.tensor(server.round)} for answer in used}
        means = [(answer.steps, reports[answer.client]) for answer in used]
        record["train"] = _combine(means)
        record["federation"] = self._describe(assignments, reports, traffic, problems)
        record |= _validation(server.round, means, server.experiment.server.weight_cap)
        if self._options.protection.noise:  # of a site that took part in all rounds
            spent = epsilon_of({self._options.protection.noise: server.round}, DELTA)
            record["privacy"] = {"epsilon": spent, "delta": DELTA}
        if server.due():
            record |= server.test()
        seconds = time.perf_counter() - began
        at_sites = {
            sites.name(client): _number(report.get("seconds"), 0, seconds) for client, report in reports.items()
        }
        self._recorder.write(record, seconds, sites=at_sites)
        self._board.round_done(server, record, seconds)
        if server.round % server.experiment.checkpoint_every == 0 or server.round == server.experiment.rounds:
            checkpoint.write(server, self._options.folder)
            if used:
                self._keep(record)
            self._checkpointed = _remembered(server)
        log(_summary(record, seconds, server.experiment.rounds, server.experiment.metric))
        self._expect_updates(len(used), problems)

    def _draw(self) -> list[Assignment]:
        """The next round's work, by what the connected sites have."""
        for client, site in self._sites.by_client.items():
            self._server.image_counts[client] = site.counts
        return self._server.assignments()

    def _write_audit(
        self, answers: Sequence[Answer], problems: Mapping[int, str], suspicious: Mapping[str, str]
    ) -> None:
        used = [answer.client for answer in answers if answer.client not in problems]
        weights = dict(zip(used, self._server.weights(used), strict=True))
        sites = [
            {
                "site": self._sites.name(answer.client),
                **({"not_used": why} if (why := problems.get(answer.client)) else {"weight": weights[answer.client]}),
                **({"suspicious": why} if (why := suspicious.get(str(answer.client))) else {}),
                **self._exchanged.get(answer.client, {}),
            }
            for answer in answers
        ]
        self._head = self._audit.write("round", run=self._file.run_name, round=self._server.round, sites=sites)

    def _note_capped(self, used: Sequence[int]) -> None:
        for client, weight in zip(used, self._server.weights(used), strict=True):
            (alone,) = self._server.weights([client])
            if weight < alone and client not in self._capped:
                self._capped.add(client)
                log(
                    f"note: site '{self._sites.name(client)}' would weigh {alone:g} and weighs {weight:g}: at most "
                    f"{self._server.experiment.server.weight_cap:g} times the round's median (server.weight_cap)"
                )

    def _keep(self, record: Mapping[str, Any]) -> None:
        """Of the rounds that learned something, keep the checkpoints of the last ones and of the best."""
        folder, score = self._options.folder, (record.get("test") or {}).get(self._server.experiment.metric)
        if score is not None and score >= self._best[0]:
            self._best = score, record["round"]
        earlier = [number for number in checkpoint.kept_rounds(folder) if number < record["round"]]
        checkpoint.keep(folder, record["round"], [*earlier[1 - _KEPT_CHECKPOINTS :], self._best[1]])

    def expect_learned(self) -> None:
        """A run whose last rounds used no site did not do what it was asked for."""
        if self._empty_rounds:
            kept = ", ".join(map(str, checkpoint.kept_rounds(self._options.folder))) or "none"
            raise RunError(
                f"the last {self._empty_rounds} of {self._server.round} rounds used no site, and no model is written; "
                f"go back with --resume --round N; checkpoints that learned something: {kept}"
            )

    def _expect_updates(self, used: int, problems: Mapping[int, str]) -> None:
        """End a run that goes on without learning."""
        self._empty_rounds = 0 if used else self._empty_rounds + 1
        if self._empty_rounds >= _MOST_EMPTY_ROUNDS:
            reasons = [f"site '{self._sites.name(client)}': {problem}" for client, problem in problems.items()]
            raise RunError(
                f"{self._empty_rounds} rounds in a row without a usable update "
                f"({'; '.join(reasons) or 'no site that was drawn can learn'}); the checkpoint of round "
                f"{self._server.round} stays: go on from it with --resume"
            )

    def _ask(
        self, assignments: list[Assignment]
    ) -> tuple[list[Answer], dict[int, dict[str, Any]], dict[int, dict[str, int]]]:
        """Answers in drawing order, what each client reported beside its update, and bytes both ways."""
        received = {assignment.client: self._server.broadcast(assignment) for assignment in assignments}
        contents, traffic = {}, {}
        random = messages.random_bytes()
        self._exchanged = {}
        for assignment in assignments:
            client = assignment.client
            if client in self._sites.by_client:
                content = messages.pack_state(received[client], random)
                content[TASK] = self._task(assignment).pack()
                contents[client] = self._sites.by_client[client].node, content
                traffic[client] = {"down": messages.array_bytes(content), "up": 0}
                self._exchanged[client] = {"sent": describe_arrays(content)}
        failed = self._pending.send(contents, TRAIN, self._options.timeout_seconds)
        replies = self._pending.collect_all()
        answers, reports = [], {}
        for assignment in assignments:
            client = assignment.client
            upload: State = {}
            if client not in contents:
                problem = "drawn, but not connected"
            elif client in failed:
                problem = "the message could not be sent"
            else:
                reply = replies.get(client)
                reports[client], upload, problem = self._read(assignment, reply)
                if reply is not None and reply.has_content() and not messages.count_problem(reply.content):
                    traffic[client]["up"] = messages.array_bytes(reply.content)
                    if traffic[client]["up"] <= self._most_bytes:  # one array may have any number of names
                        self._exchanged[client]["received"] = describe_arrays(reply.content)
            sent = received[client] if client in contents else {}
            answers.append(Answer(client, assignment.steps, sent, upload, problem))
        return answers, reports, traffic

    def _task(self, assignment: Assignment) -> Task:
        client, protection = assignment.client, self._options.protection
        return Task(
            assignment=assignment,
            experiment=self._experiment,
            run_name=self._file.run_name,
            remembered_round=_remembered(self._server).get(client, 0),
            checkpointed_round=self._checkpointed.get(client, 0),
            evaluate=(assignment.round - 1) % self._server.experiment.evaluate_every == 0,
            clip_norm=protection.clip_norm,
            dp_noise=protection.noise,
            audit=self._head,
            notice=self._sites.by_client[client].notice,
            left_out=self._left_out.pop(client, ""),
        )

    def _read(self, assignment: Assignment, reply: Message | None) -> tuple[dict[str, Any], State, str]:
        """What a site reported, its upload, and why that cannot be used."""
        report, problem = read_reply(reply)
        if problem or reply is None:
            return report, {}, problem
        if (report.get("client"), report.get("round")) != (assignment.client, assignment.round):
            return report, {}, "answered for another client or round"
        if problem := messages.count_problem(reply.content):
            return report, {}, problem
        size = messages.array_bytes(reply.content)
        if size > self._most_bytes:
            return report, {}, f"sent {size:,} bytes of arrays, expected at most {self._most_bytes:,}"
        try:
            upload = messages.unpack_state(reply.content, self._server.program.network.device)
        except Exception as error:  # whatever a site sends as an array must not end the run
            return report, {}, f"sent arrays that cannot be read ({type(error).__name__})"
        problem = messages.find_problem(upload, self._shapes)
        return report, {} if problem else upload, problem

    def _describe(
        self,
        assignments: list[Assignment],
        reports: Mapping[int, Mapping[str, Any]],
        traffic: Mapping[int, Mapping[str, int]],
        problems: Mapping[int, str],
    ) -> dict[str, Any]:
        """Who took part, on which node, and what travelled."""
        connected, name = self._sites.by_client, self._sites.name
        sites = []
        for client in (assignment.client for assignment in assignments):
            report = reports.get(client, {})
            tests, validation = (_tests(report, on) for on in ("test", "validation"))
            if tests is None or validation is None:
                log(f"round {self._server.round}: site '{name(client)}' reports a test that cannot be: not recorded")
            found = {
                "site": name(client),
                "client": client,
                "node": str(connected[client].node) if client in connected else None,
                "bytes": dict(traffic.get(client, {"down": 0, "up": 0})),
                "problem": problems.get(client),
                "memory": one_line(report["memory"]) if "memory" in report else None,
                "test_of_received_model": tests or None,
                "validation_of_received_model": validation or None,
            }
            sites.append({key: value for key, value in found.items() if value is not None})
        return {
            "sites": sites,
            "connected": [name(client) for client in sorted(connected)],
            # Drawing does not look at who is connected, so that it is the simulator's and that of a resumed run.
            "drawn_but_away": [name(a.client) for a in assignments if a.client not in connected],
            "refused": sorted(self._sites.refused.values()),
        }


def _dataset(options: RunOptions) -> Dataset:
    """What images look like and what classes there are, with the images that the server tests on."""
    if options.tests is None:
        return site_data.without_images(options.description)
    dataset, unreadable = site_data.load_tests(options.tests, options.description)
    for file, reason in unreadable:
        log(f"left out: {options.tests.path / file}: {reason}")
    return dataset


def _gather(grid: Grid, options: RunOptions) -> ConnectedSites:
    names = options.description.sites
    sites = ConnectedSites(
        grid,
        names,
        options.description.fingerprint(),
        _for_sites(options.experiment),
        options.timeout_seconds,
        Registry(options.server_folder),
        AuditLog(options.server_folder),
    )
    keys = options.server_folder / "nodes" if options.server_folder is not None else Path()
    able = [name for name in names if (keys / f"{name}.pub").exists()]  # others were revoked
    sites.wait(options.minimum_sites or len(able or names), options.wait_seconds)
    return sites


def _make_server(
    options: RunOptions, dataset: Dataset, sites: ConnectedSites, earlier: Mapping[int, ImageCounts]
) -> Server:
    """The server before its first round; `earlier` is what sites had that took part in the run before."""
    experiment, description = options.experiment, options.description
    known = {**earlier, **{client: site.counts for client, site in sites.by_client.items()}}
    counts = [known.get(client, ImageCounts(0, 0)) for client in range(len(description.sites))]
    heard = [each for each in counts if each.total]  # a site has images; one without any is not heard of yet
    experiment = _settle_batch(experiment, heard or counts)
    resumes = (options.folder / checkpoint.FILE).exists()
    engine = Engine(experiment.engine)
    server = Server(experiment, dataset, counts, engine, description.fingerprint(), resumes=resumes)
    if len(heard) == len(counts) and not any(each.labelled for each in counts):
        raise ConfigError("no site has a labelled image to learn from: at least one of them must label some")
    unlabelled = [sites.name(client) for client, each in enumerate(counts) if each.unlabelled]
    if server.method.needs.every_label and unlabelled:
        raise ConfigError(
            f"method '{experiment.method}' learns from the labels of all images, but there are images without a label "
            f"at {', '.join(unlabelled)}; use another method"
        )
    return server


def _for_sites(experiment: Experiment) -> str:
    """The experiment as sites are told it: the file that the server starts from is its own."""
    return experiments.to_yaml(experiment.model_copy(update={"init": None, "init_sha256": None}))


def _settle_batch(experiment: Experiment, counts: list[ImageCounts]) -> Experiment:
    """`auto` becomes a number, which stays when sites come or go and when the run is resumed.

    Sites say themselves how many images they have; the median, of an even number the lower one, is not one liar's.
    """
    usual = sorted(counts, key=lambda each: each.unlabelled)[(len(counts) - 1) // 2]
    settled = resolve_unlabelled_batch(experiment, [usual])
    if experiment.unlabelled_batch == "auto" and settled > _MOST_UNLABELLED:
        raise ConfigError(
            f"unlabelled_batch: auto, a fifth of a usual site's unlabelled images, would be {settled} in each step, "
            f"more than {_MOST_UNLABELLED}; add --set unlabelled_batch=N"
        )
    return experiments.build(experiment.model_dump() | {"unlabelled_batch": settled})


def _write_start(server: Server, folder: Path) -> None:
    """Write what a run starts with."""
    about = {"command": "flwr run", "device": str(server.engine.device)}  # the process's own holds a token
    write_json(folder / records.PARTITION, {"classes": list(server.dataset.classes)}, RunError)
    write_json(folder / records.ENVIRONMENT, environment.describe() | about, RunError)
    write_whole(folder / records.CONFIG, experiments.to_yaml(server.experiment).encode(), RunError)


def _remembered(server: Server) -> dict[int, int]:
    """For each client with a memory, the round whose memory counts."""
    return {client: int(memory["round"]) for client, memory in server.memories.items()}


def _combine(reports: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, float]:
    """Means over all steps of the round, from those of each client."""
    found = {}
    names = Counter(key for _, report in reports for key in report if _MEAN.fullmatch(key))
    for name, _ in names.most_common(_MOST_MEANS):  # those of most clients: one client's cannot take their place
        least = 0.0 if name.startswith(("train.loss", "train.weight")) else -_LARGEST_MEAN
        found_of = [(steps, _number(report.get(name), least, _LARGEST_MEAN)) for steps, report in reports]
        parts = [(steps, value) for steps, value in found_of if value is not None]
        if parts:
            found[name[6:]] = sum(steps * value for steps, value in parts) / sum(steps for steps, _ in parts)
    return found


def _validation(
    round_number: int, reports: Sequence[tuple[int, Mapping[str, Any]]], cap: float | None = None
) -> dict[str, Any]:
    """The accuracy of the model that sites received, the last round's, on all images that they set aside.

    As in the mean of updates, no site weighs more than `cap` times the median one: its number is its own word.
    """
    told = [_tests(report, "validation") or {} for _, report in reports]
    found = [(one["accuracy"], one["images"]) for one in told if "accuracy" in one and one.get("images")]
    total = sum(images for _, images in found)
    if not total or round_number == 1:  # the first model has learned nothing
        return {}
    weights = capped([images for _, images in found], cap)
    accuracy = sum(one * weight for (one, _), weight in zip(found, weights, strict=True)) / sum(weights)
    return {"validation": {"accuracy": accuracy, "images": total, "round": round_number - 1}}


def _number(value: Any, least: float = -_LARGEST, most: float = _LARGEST) -> int | float | None:
    """A number that a site reported, or None for anything else."""
    return value if type(value) in (int, float) and least <= value <= most else None


def _tests(report: Mapping[str, Any], on: str) -> dict[str, float] | None:
    """What a site says of the received model on its own `test` or `validation` images; None where that cannot be."""
    found = {key: value for key in _TESTS if (value := report.get(f"{on}.{key}")) is not None}
    possible = all(_number(value, 0, _TESTS[key]) is not None for key, value in found.items())
    return found if possible and isinstance(found.get("images", 0), int) else None


def _summary(record: dict[str, Any], seconds: float, rounds: int, metric: str) -> str:
    used = len(record["clients"]) - len(record["left_out"])
    parts = [f"round {record['round']}/{rounds}", f"{used} of {len(record['clients'])} drawn sites"]
    if "loss" in record["train"]:
        parts.append(f"loss {record['train']['loss']:.3f}")
    if "privacy" in record:
        parts.append(f"ε {record['privacy']['epsilon']:.2f} of a site at δ {record['privacy']['delta']:g}")
    if "test" in record:
        parts.append(f"{TITLES[metric]} {percent(record['test'].get(metric))}")
    if "validation" in record:
        parts.append(f"validation {percent(record['validation'].get('accuracy'))}")
    return ", ".join([*parts, f"{seconds:.1f} s"])
