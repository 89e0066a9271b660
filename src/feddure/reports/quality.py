"""How good the models of runs are, beyond one number: every metric, calibration, and what is known of each class."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from feddure.reports import figures, style
from feddure.reports.diagnostics import class_names
from feddure.reports.figures import Line, Shown
from feddure.reports.names import listed
from feddure.reports.page import Group, Section, Table, Text, embed
from feddure.reports.style import LineStyle
from feddure.tracking import metrics
from feddure.tracking.records import Run
from feddure.tracking.summary import points

_MODELS = {"test": "last", "test_ema": "averaged"}
_MOST_ROWS = 30  # of a table that is not folded away
_MOST_LINES = 12  # of a reliability diagram
_BINS = ("images", "confidence", "accuracy")
_READING = (
    "Of predictions that are 80 % sure, 80 % should be right: dots below the diagonal are too sure, dots above it not "
    "sure enough. Larger dots hold more test images."
)


class _Tested(NamedTuple):
    """A model of a run at its last evaluation."""

    line: Line
    model: str  # last or averaged
    found: Mapping[str, Any]
    classes: list[str]


def sections(shown: Sequence[Shown]) -> list[Section]:
    """The section of a report; none where nothing was evaluated."""
    tested = [one for each in shown for one in _tested(each.run, each.line)]
    if not tested:
        return []
    several = len(shown) > 1
    names = [name for name in metrics.TITLES if any(metrics.known(one.found, name) is not None for one in tested)]
    columns = [*(["run"] if several else ()), "model", *(metrics.TITLES[name] for name in names)]
    rows = [
        [*([one.line.label] if several else ()), one.model, *(points(metrics.known(one.found, name)) for name in names)]
        for one in tested
    ]
    formats = [one.line.fmt for one in tested] if several else ()
    parts: list[Any] = [Table(columns, rows, numbers_from=1 + several, formats=formats)]
    calibrated = [one for one in tested if sum((one.found.get("calibration") or {}).get("images", ()))]
    pictures = []
    if 0 < len(calibrated) <= _MOST_LINES:
        found = [(one.line.fmt, one.model, one.found["calibration"]) for one in calibrated]
        pictures.append(embed(reliability(found), "Reliability diagram", reading=_READING))
    averaged = [one for one in tested if one.model == "averaged" and one.found.get("confusion")]
    if averaged and not several:
        drawn = figures.confusion(averaged[0].found["confusion"], averaged[0].classes)
        alt = "Confusion matrix of the averaged model"
        pictures.append(embed(drawn, alt, alt))
    parts += [Group(pictures)] if pictures else []
    by_run: dict[str, list[_Tested]] = {}
    for one in tested:
        by_run.setdefault(one.line.label, []).append(one)
    tables = {label: table for label, models in by_run.items() if (table := _by_class(models))}
    about = "Sensitivity and specificity of each class, %"
    if several and tables:
        named = [part for label, table in tables.items() for part in (Text(label, "heading"), table)]
        parts.append(Group(named, about))
    for table in tables.values() if not several else ():
        parts += _folded(about, table)
    parts += _by_site(tested, several)
    text = (
        "Each model on all test images at its last evaluation, in per cent. Balanced accuracy, macro F1 and AUROC "
        "(each class against the rest) are means over classes, rare ones as much as frequent ones. The calibration "
        f"error (ECE, {metrics.BINS} bins) is how far confidence lies from accuracy; lower is better."
    )
    text += _absent(tested)
    if any(one.run.partition.get("sites") for one in shown) and not any(one.found.get("by_site") for one in tested):
        text += " No site has test images of its own."
    return [Section("Quality", text, parts)]


def reliability(shown: Sequence[tuple[LineStyle, str, Mapping[str, Any]]]) -> Figure:
    """Accuracy against confidence, bin by bin, of models by their line's style and kind; the averaged one is dotted."""
    with style.applied():
        canvas = style.new_figure(figures.HALF, figures.HALF)
        axes = canvas.add_subplot()
        axes.plot([0, 100], [0, 100], color=style.MUTED, linewidth=0.8)
        for fmt, model, bins in shown:
            total = sum(bins["images"])
            dots = [
                (100 * confidence, 100 * accuracy, 8 + 300 * images / total)
                for images, confidence, accuracy in zip(*(bins[name] for name in _BINS), strict=True)
                if images and confidence is not None and accuracy is not None
            ]
            if dots:
                x, y, sizes = zip(*dots, strict=True)
                line = ":" if model == "averaged" else "-"
                axes.plot(x, y, line, color=fmt["color"], linewidth=1.2, clip_on=False)
                face = "white" if model == "averaged" else fmt["color"]
                axes.scatter(
                    x, y, sizes, marker=fmt["marker"], facecolor=face, edgecolor=fmt["color"], zorder=3, clip_on=False
                )
        axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", xlabel="confidence, %", ylabel="right, %")
        dotted = ", dotted: averaged model" if any(model == "averaged" for _, model, _ in shown) else ""
        axes.set_title(f"Reliability{dotted}")
        return canvas


def _tested(run: Run, line: Line) -> Iterator[_Tested]:
    for key, model in _MODELS.items():
        found = [record[key] for record in run.metrics if metrics.known(record.get(key) or {}, "accuracy") is not None]
        if found:
            size = len(found[-1].get("per_class") or ())
            yield _Tested(line, model, found[-1], class_names(run.partition.get("classes", ()), size))


def _by_class(models: Sequence[_Tested]) -> Table | None:
    """A row for each class: its test images, and how many of them, and of the others, are told right."""
    models = [one for one in models if one.found.get("confusion") and one.found.get("per_class")]
    if not models:
        return None
    images = _images(models[0])
    columns = ["class", "test images"]
    values: list[Sequence[float | None]] = []
    for one in models:
        of = f", {one.model} model" if len(models) > 1 else ""
        columns += [f"sensitivity{of}", f"specificity{of}"]
        sensitivity = [share if count else None for share, count in zip(one.found["per_class"], images, strict=False)]
        values += [sensitivity, metrics.known(one.found, "specificity") or [None] * len(images)]
    rows = [
        [name, f"{count:,}", *(points(of_classes[number]) for of_classes in values)]
        for number, (name, count) in enumerate(zip(models[0].classes, images, strict=True))
    ]
    return Table(columns, rows, numbers_from=1)


def _by_site(tested: Sequence[_Tested], several: bool) -> list[Any]:
    """A row for each site that has test images of its own; nothing where none has."""
    tested = [one for one in tested if one.found.get("by_site")]
    sites = {name: found["images"] for one in tested for name, found in one.found["by_site"].items()}
    if not sites:
        return []
    names = [f"{one.line.label}, {one.model}" if several else f"{one.model} model" for one in tested]
    rows = [
        [site, f"{images:,}", *(points((one.found["by_site"].get(site) or {}).get("accuracy")) for one in tested)]
        for site, images in sites.items()
    ]
    return _folded(
        "Accuracy on each site's own test images, %", Table(["site", "test images", *names], rows, numbers_from=1)
    )


def _folded(about: str, table: Table) -> list[Any]:
    """A table under its heading; a long one is folded away."""
    return [Group([table], about)] if len(table.rows) > _MOST_ROWS else [Text(about, "heading"), table]


def _images(one: _Tested) -> list[int]:
    """Test images of each class; where clients train alone the confusion is the sum over their models."""
    return [sum(row) // max(1, len(one.found.get("by_client") or (0,))) for row in one.found["confusion"]]


def _absent(tested: Sequence[_Tested]) -> str:
    """Which classes the means leave out."""
    absent = {
        name: None
        for one in tested
        if one.found.get("confusion")
        for name, images in zip(one.classes, _images(one), strict=True)
        if not images
    }
    return f" Without test images, and left out of the means: {listed(list(absent))}." if absent else ""
