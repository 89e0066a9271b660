"""`feddure federate`: a real federation of sites, encrypted and authenticated, on Flower."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from feddure.cli.federate import sites as site_commands
from feddure.cli.federate.sites import Folder, SiteName, server_folder
from feddure.cli.options import AsJson, Init, Rounds, Seed, Sets, names
from feddure.cli.tables import plain_console
from feddure.errors import ConfigError

app = typer.Typer(no_args_is_help=True)
app.add_typer(site_commands.app, name="sites")


@app.callback(help="A real federation of sites: encrypted, authenticated, on Flower. Try it: `feddure federate demo`.")
def _expect_packages() -> None:
    try:
        import cryptography  # noqa: F401
        import flwr  # noqa: F401
    except ImportError as problem:
        raise ConfigError(
            f"a real federation needs the package '{problem.name}': pip install 'feddure[flower]'"
        ) from None


SiteFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's unpacked bundle, or the whole folder.")]
Images = Annotated[
    str,
    typer.Option(
        "--data", help="The site's images: labelled/CLASS/ and unlabelled/; folder:PATH?depth=12 for 12-bit files."
    ),
]
ClipNorm = Annotated[float | None, typer.Option("--clip-norm", help="Bound on the Euclidean norm of an update.")]
Noise = Annotated[
    float | None,
    typer.Option(
        "--dp-noise",
        help="Differential privacy of a site, all its images together: the noise's deviation over --clip-norm.",
    ),
]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the federation.")],
    sites: Annotated[str, typer.Option("--sites", metavar="A,B,C", help="Names of the sites.")],
    classes: Annotated[str, typer.Option("--classes", metavar="X,Y,Z", help="Class names, in order.")],
    server_address: Annotated[
        str, typer.Option("--server-address", metavar="HOST[:PORT]", help="Where sites reach the server; port 9092.")
    ],
    size: Annotated[int, typer.Option("--size", help="Height and width of images in pixels after reading.")] = 32,
    channels: Annotated[int, typer.Option("--channels", help="1 for grey images, 3 for colour.")] = 3,
    flip: Annotated[
        bool, typer.Option("--flip/--no-flip", help="Mirror images at random; not where left and right matter.")
    ] = True,
    mean: Annotated[str | None, typer.Option("--mean", metavar="A,B,C", help="Mean of images / 255; 0.5 each.")] = None,
    std: Annotated[str | None, typer.Option("--std", metavar="A,B,C", help="Their deviation; 0.25 each.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The federation's name; default: the folder's.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds the server waits for a round's sites.")] = 600,
    public_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--public-key", metavar="SITE=FILE", help="A site's own public key, of a pair made there; may be repeated."
        ),
    ] = None,
    control_port: Annotated[
        int, typer.Option("--control-port", help="Port of the SuperLink on the server's loopback address.")
    ] = 9093,
) -> None:
    """Make a federation: certificates, keys and a bundle for each site.

    Examples:

    ```text
    feddure federate init lungs --sites a,b --classes x,y --server-address fed.example.org --size 64 \\
      --public-key a=a.pub --public-key b=b.pub   # made at the sites, which keep the private ones
    feddure federate init lungs --sites a,b --classes x,y --server-address 10.0.0.7:9443 --size 64 --channels 1
    ```
    """
    from feddure.cli.federate import show
    from feddure.flower.app import description
    from feddure.flower.deploy import init as initialise
    from feddure.flower.deploy.layout import split_address

    host, port = split_address(server_address, initialise.PORT)
    tree = {
        "name": name or folder.resolve().name,
        "classes": names("--classes", classes),
        "size": size,
        "channels": channels,
        "mean": _numbers("--mean", mean) or [0.5] * channels,
        "std": _numbers("--std", std) or [0.25] * channels,
        "flip": flip,
        "sites": names("--sites", sites),
        "server": {"host": host, "port": port},
        "timeout_seconds": timeout,
    }
    agreed = description.parse(json.dumps(tree), "federate init")
    made = initialise.initialise(folder, agreed, _key_files(public_keys or []), control_port)
    show.show_made(made, agreed)


@app.command()
def renew(
    folder: Folder,
    authority_key: Annotated[
        Path | None, typer.Option("--authority-key", help="Where authority/ca.key was taken to.")
    ] = None,
) -> None:
    """Give the server a new certificate, signed by the same authority; sites need nothing new.

    Example: `feddure federate renew lungs --authority-key /media/safe/ca.key`, then start the server again.
    """
    from feddure.flower.deploy import init as initialise

    ends = initialise.renew(server_folder(folder), authority_key).not_valid_after_utc
    print(f"the server's new certificate holds until {ends:%Y-%m-%d}; start the server again to use it")


@app.command()
def check(folder: SiteFolder, name: SiteName, data: Images, as_json: AsJson = False) -> None:
    """Look at a site's images, keys, certificates and connection; exit code 1 if it could not train.

    Example: `feddure federate check north north --data /images`
    """
    from feddure.cli.federate import show
    from feddure.flower.app.site_data import ImageFolder
    from feddure.flower.deploy.check import check as check_site
    from feddure.flower.deploy.layout import find_bundle

    found = check_site(find_bundle(folder.resolve(), name), name, ImageFolder.parse(data, "--data"))
    if as_json:
        show.print_json(found)
    else:
        show.show_check(found)
    if not found.passed:
        raise typer.Exit(1)


@app.command()
def server(
    folder: Folder,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to bind instead of the server's own; 0.0.0.0 for all of this machine."),
    ] = None,
) -> None:
    """Run the server until Ctrl-C: Flower's SuperLink on the loopback address, and the proxy that sites reach.

    Examples:

    ```text
    feddure federate server lungs                   # binds the address given to init
    feddure federate server lungs --host 10.0.0.7   # behind a router: the machine's own address
    ```
    """
    from feddure.flower.deploy import server

    _until_terminated(lambda: server.serve(server_folder(folder), host, _show), endless=True)


@app.command()
def site(
    folder: SiteFolder,
    name: SiteName,
    data: Images,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: cuda where there is.")] = None,
    clip_norm: ClipNorm = None,
    dp_noise: Noise = None,
    dp_budget: Annotated[
        float | None,
        typer.Option("--dp-budget", help="ε that all updates together may tell of this site's images; then it stops."),
    ] = None,
    dp_delta: Annotated[float | None, typer.Option("--dp-delta", help="δ of that ε (1e-5).")] = None,
    helpers: Annotated[
        bool, typer.Option("--helpers/--no-helpers", help="FedMatch hands this site's parameters to other sites.")
    ] = True,
    allow_modules: Annotated[
        bool, typer.Option("--allow-modules", help="Runs may name classes of modules installed here.")
    ] = False,
    approve: Annotated[
        str,
        typer.Option(
            "--approve",
            metavar="ask|always|HASH",
            help="Take part in runs that you approve one by one, in all, or in this one alone.",
        ),
    ] = "ask",
    verbose: Annotated[bool, typer.Option("--verbose", help="Also show Flower's own logs and commands.")] = False,
) -> None:
    """Join as a site until Ctrl-C: Flower's SuperNode, with this site's images.

    Examples:

    ```text
    feddure federate site north north --data /images --approve ask       # each run, here or by `federate approve`
    feddure federate site north north --data /images --approve always    # whatever the server asks
    feddure federate site north north --data /images --device cuda --clip-norm 1.0
    feddure federate site north north --data /images --clip-norm 1.0 --dp-budget 8   # and no further
    feddure federate site north north --data 'folder:/images?depth=12'   # 12-bit greys in 16-bit files
    ```
    """
    from feddure.flower.app.site_data import ImageFolder
    from feddure.flower.deploy import site as sites
    from feddure.flower.deploy.layout import find_bundle

    bundle = find_bundle(folder.resolve(), name)
    wanted = {"device": device, "clip-norm": clip_norm}
    wanted |= {"dp-noise": dp_noise, "dp-budget": dp_budget, "dp-delta": dp_delta}
    options = {key: value for key, value in wanted.items() if value is not None}
    images = ImageFolder.parse(data, "--data")
    if approve not in ("ask", "always") and not re.fullmatch(r"[0-9a-f]{32}", approve):
        raise ConfigError(f"--approve {approve}: expected ask, always, or the 32 digits of a run that its server shows")
    options |= {"approve": approve}
    options |= ({} if helpers else {"helpers": False}) | ({"modules": True} if allow_modules else {})
    _until_terminated(lambda: sites.join(bundle, name, images, options, _show, verbose), endless=True)


@app.command()
def approve(
    folder: SiteFolder,
    name: SiteName,
    found: Annotated[
        str | None, typer.Argument(metavar="[HASH]", help="The run; default: list those that wait.")
    ] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Say no.")] = False,
) -> None:
    """Let a site that asks (`--approve ask`, the default) take part in a run.

    Examples:

    ```text
    feddure federate approve north north                              # what waits, and what it asks for
    feddure federate approve north north 0123456789abcdef0123456789abcdef
    feddure federate approve north north 0123456789abcdef0123456789abcdef --refuse
    ```
    """
    from feddure.flower.app.policy import Answers
    from feddure.flower.deploy.layout import find_bundle

    answers = Answers(find_bundle(folder.resolve(), name).state)
    if found is not None:
        answers.answer(found, approved=not refuse)
    words = {True: "approved", False: "refused", None: "waits"}
    waiting = answers.waiting()
    for run_hash, entry in answers.read().items():
        if run_hash in waiting or entry["answer"] is not None:
            _show(f"{run_hash}  {words[entry['answer']]}: {entry['asks']}")
    if not waiting:
        _show("no run waits for an answer")


@app.command()
def run(
    folder: Folder,
    method: Annotated[str | None, typer.Option("--method", help="Method name; default: the preset's.")] = None,
    rounds: Rounds = None,
    seed: Seed = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help="Start from this preset (`feddure config`); default: recommended."),
    ] = None,
    init: Init = None,
    sets: Sets = None,
    test: Annotated[
        str | None, typer.Option("--test", help="The server's test images, a folder for each class; default: none.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder; default: a new one in DIR/runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of --out.")] = False,
    round_number: Annotated[
        int | None, typer.Option("--round", min=1, help="With --resume: go back to this round; the last 3 are kept.")
    ] = None,
    minimum_sites: Annotated[
        int | None,
        typer.Option("--minimum-sites", min=1, help="Sites to start and go on with; default: all, then any."),
    ] = None,
    wait: Annotated[float | None, typer.Option("--wait", min=0, help="Seconds to wait for them; default: 600.")] = None,
    clip_norm: ClipNorm = None,
    dp_noise: Noise = None,
) -> None:
    """Train over the sites, on the server's machine while `federate server` runs; shows the run's log.

    The exit code is 0 only if the run completed.

    Examples:

    ```text
    feddure federate run lungs --rounds 50 --test held-out      # preset recommended: FedTutor
    feddure federate run lungs --method fedavg-fixmatch --rounds 50 --set model=cnn --set local_steps=10
    feddure federate run lungs --method fedtutor --init pretrained.safetensors
    feddure federate run lungs --out lungs/runs/fedtutor --resume
    feddure federate run lungs --out lungs/runs/fedtutor --resume --round 17
    ```
    """
    from feddure import experiments, recommended
    from feddure.cli.federate import show
    from feddure.flower.app.site_data import ImageFolder
    from feddure.flower.deploy import run as runs

    federation = server_folder(folder)
    federation.read()
    if resume and out is None:
        raise ConfigError("--resume was given without --out: name the folder of the run to go on with")
    if round_number is not None and not resume:
        raise ConfigError("--round was given without --resume: only a run that is there can go back")
    if preset is None and not resume:
        preset = recommended.NAME
    given = {
        "preset": preset,
        "method": method,
        "rounds": rounds,
        "seed": seed,
        "init": str(Path(init).expanduser().resolve()) if init is not None else None,
        "settings": shlex.join(sets or ()) or None,
        "test-folder": str(ImageFolder.parse(test, "--test").resolve()) if test is not None else None,
        "minimum-sites": minimum_sites,
        "wait-seconds": wait,
        "clip-norm": clip_norm,
        "dp-noise": dp_noise,
    }
    options = {key: value for key, value in given.items() if value is not None}
    run_folder = out or experiments.new_folder(method or experiments.load(preset).method, federation.runs)
    _until_terminated(
        lambda: show.show_run(runs.run(federation, options, run_folder, _show, resume, round_number or 0))
    )


@app.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """Which sites are registered and online, and how the runs are doing; on the server's machine.

    The exit code is 1 where the server does not run.

    Example: `feddure federate status lungs --json`
    """
    from feddure.cli.federate import show
    from feddure.flower.deploy.status import read_status

    found = read_status(server_folder(folder))
    if as_json:
        show.print_json(found)
    else:
        show.show_status(found, folder)
    if not found.running:
        raise typer.Exit(1)


@app.command()
def audit(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The federation's folder, a site's bundle, or an audit.jsonl.")
    ],
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Compare the server's log with this one of a site: a bundle or an audit.jsonl."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify an audit log and print it; exit code 1 where it was changed.

    Whoever owns a machine can write its log anew: compare it with what others noted of it.

    Examples:

    ```text
    feddure federate audit lungs        # the server's
    feddure federate audit north        # a site's own, in its unpacked bundle
    feddure federate audit lungs --against north/state/audit.jsonl   # where the two disagree
    ```
    """
    from feddure.cli.federate import show
    from feddure.flower.app import audit
    from feddure.flower.deploy.layout import find_audit_log

    found = audit.read(find_audit_log(folder))
    other = audit.read(find_audit_log(against)) if against is not None else None
    problems = [each.problem for each in (found, other) if each is not None and each.problem]
    if other is not None:
        problems += audit.compare(found, other)
        show.show_comparison(problems)
    elif as_json:
        show.print_json(found)
    else:
        show.show_audit(found)
    if problems:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Keep everything in this new folder.")] = None,
    method: Annotated[str, typer.Option("--method", help="Method name.")] = "fedtutor",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Communication rounds.")] = 4,
    attacker: Annotated[
        bool, typer.Option("--attacker", help="One of the sites poisons its updates; with and without defences.")
    ] = False,
) -> None:
    """A whole federation on this machine: a server, three sites, TLS and keys, a few rounds; then all of it ends.

    Examples:

    ```text
    feddure federate demo                  # FedTutor; about two minutes on two cores
    feddure federate demo --out demo       # and look at what it made
    feddure federate demo --attacker       # one of the sites is hostile: who is named, and what helps
    ```
    """
    from feddure.cli.federate import show
    from feddure.flower.deploy import demo as demonstration

    _until_terminated(lambda: demonstration.demonstrate(out, _show, show, method, rounds, attacker))


def _until_terminated(work: Callable[[], Any], endless: bool = False) -> None:
    """Do work that starts processes; Ctrl-C, SIGTERM and a closed terminal end them.

    Ctrl-C is how endless work is meant to end, and a failure of any other.
    """
    from feddure.flower.deploy.processes import Terminated, terminating_on_signals

    try:
        with terminating_on_signals():
            work()
    except Terminated as ended:
        raise typer.Exit(0 if endless and ended.by_user else ended.exit_code) from None


def _show(line: str) -> None:
    from feddure.flower.app.sanitize import printable

    plain_console().print(printable(line, 20_000))
    sys.stdout.flush()


def _numbers(option: str, text: str | None) -> list[float]:
    try:
        return [float(number) for number in text.split(",")] if text is not None else []
    except ValueError:
        raise ConfigError(
            f"{option} {text}: expected numbers with commas between them, such as 0.49,0.48,0.45"
        ) from None


def _key_files(texts: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in texts:
        site, equals, file = text.partition("=")
        if not equals or not site or not file:
            raise ConfigError(f"--public-key {text}: expected SITE=FILE, such as north=north.pub")
        if site in found:
            raise ConfigError(f"--public-key {text}: site '{site}' was given a key already")
        found[site] = Path(file)
    return found
