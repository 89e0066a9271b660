"""Metrics from single images, one after the other, in plain Python."""

from collections.abc import Sequence

BINS = 15


def metrics(probabilities: Sequence[Sequence[float]], labels: Sequence[int]) -> dict[str, float]:
    """All metrics by their definitions; classes without images, or without others, are left out of means."""
    classes, images = range(len(probabilities[0])), range(len(labels))
    predicted = [max(classes, key=lambda c: (probabilities[i][c], -c)) for i in images]
    recalls, scores, areas = [], [], []
    for c in classes:
        own, others = [i for i in images if labels[i] == c], [i for i in images if labels[i] != c]
        if not own:
            continue
        hits = sum(predicted[i] == c for i in own)
        recalls.append(hits / len(own))
        precision = hits / max(1, sum(p == c for p in predicted))
        scores.append(2 * precision * recalls[-1] / (precision + recalls[-1]) if hits else 0.0)
        if others:
            pairs = [(probabilities[i][c], probabilities[j][c]) for i in own for j in others]
            areas.append(sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs))
    gaps = [0.0] * BINS
    for i in images:
        confidence = probabilities[i][predicted[i]]
        gaps[min(int(confidence * BINS), BINS - 1)] += (predicted[i] == labels[i]) - confidence
    return {
        "accuracy": sum(p == t for p, t in zip(predicted, labels, strict=True)) / len(labels),
        "balanced_accuracy": sum(recalls) / len(recalls),
        "macro_f1": sum(scores) / len(scores),
        "auroc": sum(areas) / len(areas),
        "ece": sum(map(abs, gaps)) / len(labels),
    }
