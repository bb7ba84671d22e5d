"""Write the data card: what a release is, how to load it, what it is not for."""

from __future__ import annotations

import json

from understudy.data.layout import (
    CSV,
    PARQUET,
    TENSORS,
)
from understudy.data.synthetic import SyntheticSet
from understudy.privacy.public import Public
from understudy.privacy.release import Release
from understudy.privacy.statement import show_number


def data_card(
    release: Release, synthetic: SyntheticSet | None, source: str | None, licence: str | None
) -> str:
    """Write README.md: Hugging Face front matter, then what a stranger needs to know."""
    public, statement = release.public, release.statement
    what = "image" if public.is_image else "table"
    lines = _front_matter(public, synthetic, licence)
    lines += [f"# A synthetic stand-in for {_inline(public.name)}", ""]
    if synthetic is None:
        lines += [
            (
                "This release holds noisy answers only. `understudy synthesise FOLDER` makes a "
                "synthetic set from them, of any size and as often as you like: it costs no privacy."
            ),
            "",
        ]
    else:
        lines += [
            (
                f"{len(synthetic)} synthetic {'images' if public.is_image else 'rows'} in "
                f"{len(public.classes)} classes, made to train models in place of a sensitive "
                f"{what} dataset that cannot be shared."
            ),
            "",
        ]
        if public.is_image:
            lines += ["![Synthetic images, one class a row](contact_sheet.png)", ""]
        lines += ["| class | label | synthetic records |", "| --- | ---: | ---: |"]
        lines += [
            f"| {_inline(name)} | {label} | {count} |"
            for label, (name, count) in enumerate(
                zip(public.classes, synthetic.per_class, strict=True)
            )
        ]
        lines += ["", f"A record has shape {_shape(public)}. {_scale(public)}", ""]
    lines += [
        "## What is guaranteed",
        "",
        _inline(statement.paragraph()),
        "",
        "| | |",
        "| --- | --- |",
        f"| epsilon | {show_number(statement.epsilon)} |",
        f"| delta | {statement.delta:g} |",
        f"| epsilon of everything from these records | {show_number(statement.total_epsilon)} |",
        f"| neighbouring datasets | {statement.adjacency.value}: {_inline(statement.unit)} |",
        "",
        "[STATEMENT.md](STATEMENT.md) has every question asked and what the guarantee rests on.",
        "",
        "## How it was made",
        "",
        f"With the method `{_inline(str(release.recipe.get('method', 'unknown')))}`"
        + (f" ({_inline(source)})" if source else "")
        + " of understudy, on records prepared so: "
        + (_inline("; ".join(public.preparation)) or "nothing was done to them")
        + ". The whole configuration is in [recipe.json](recipe.json).",
        "",
    ]
    if statement.departures:
        lines += ["Departures from the published method:", ""]
        lines += [f"- {_inline(text)}" for text in statement.departures]
        lines += [""]
    if synthetic is not None:
        lines += _examples(public)
    lines += [
        "## Verify it",
        "",
        "```sh",
        "understudy verify FOLDER",
        "```",
        "",
        "compares every file with its hash and computes epsilon again from the recorded questions.",
        "",
        *_limits(synthetic, licence),
    ]
    return "\n".join(lines)


def _front_matter(public: Public, synthetic: SyntheticSet | None, licence: str | None) -> list[str]:
    lines = ["---"]
    if licence is None:
        lines += ["license: other", "license_name: to-be-chosen-by-the-data-holder"]
    else:
        lines += [f"license: {json.dumps(licence)}"]
    lines += [
        f"pretty_name: {json.dumps(f'A synthetic stand-in for {public.name}')}",
        "task_categories:",
        f"- {'image' if public.is_image else 'tabular'}-classification",
        "tags:",
        "- synthetic",
        "- differential-privacy",
        "- understudy",
    ]
    if synthetic is not None:
        steps = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))
        size = next((name for bound, name in steps if len(synthetic) < bound), "n>1M")
        lines += ["size_categories:", f"- {size}"]
        lines += ["configs:", "- config_name: default", f"  data_files: {PARQUET}"]
    return [*lines, "---", ""]


def _examples(public: Public) -> list[str]:
    """Write loading examples, run from inside the folder. The tests execute them."""
    flat = '.reshape(len(data["images"]), -1)' if public.is_image else ""
    features = 'train[0]["image"], train.features["label"]' if public.is_image else "train[0]"
    return [
        "## Load it",
        "",
        "From inside this folder, with PyTorch:",
        "",
        "```python",
        "import torch, safetensors.torch",
        f'data = safetensors.torch.load_file("{TENSORS}")',
        'train = torch.utils.data.TensorDataset(data["images"], data["labels"])',
        "```",
        "",
        "with scikit-learn:",
        "",
        "```python",
        "import safetensors.numpy, sklearn.linear_model",
        f'data = safetensors.numpy.load_file("{TENSORS}")',
        "model = sklearn.linear_model.LogisticRegression(max_iter=1000)",
        f'model.fit(data["images"]{flat}, data["labels"])',
        "```",
        "",
        "with Hugging Face:",
        "",
        "```python",
        "from datasets import load_dataset",
        f'train = load_dataset("parquet", data_files="{PARQUET}", split="train")',
        f"print({features})",
        "```",
        "",
    ]


def _limits(synthetic: SyntheticSet | None, licence: str | None) -> list[str]:
    lines = [
        "## Limits",
        "",
        (
            "- It is made to train classifiers of the classes above. A single synthetic record means "
            "nothing: draw no conclusion about a person, a patient or a case from one."
        ),
        (
            "- Do not use it to estimate frequencies, correlations or effects, to audit fairness, or "
            "to validate a model: test on real records, where they are held."
        ),
        (
            "- Rare groups are represented worst: what few records have in common is what the noise "
            "hides. A model trained here may fail them."
        ),
        (
            "- The guarantee covers each protected unit, not facts true of the whole dataset, and it "
            "adds up with everything else released from the same records."
        ),
    ]
    if synthetic is not None and synthetic.public.is_image:
        lines.append(
            f"- `{TENSORS}` is what to train on. The Parquet file and the pictures are cut to 8 "
            "bits, which loses what lies outside the range of real images."
        )
    if licence is None:
        lines.append(
            "- The data holder has not chosen a licence yet: `save(folder, *load(folder), "
            'licence="...", overwrite=True)` from `understudy.data.folder` puts one here and keeps '
            "the hashes right."
        )
    return [*lines, ""]


def _scale(public: Public) -> str:
    if public.is_image:
        return (
            "Real images lie in [-1, 1] (pixel / 127.5 - 1); synthetic values may leave it, and "
            "are best left so for training."
        )
    if public.columns:
        return (
            f"`{TENSORS}` holds the encoded rows (numbers scaled from their declared range to "
            f"[-1, 1], categories as one column each); `{PARQUET}` and `{CSV}` hold the cells."
        )
    return "Real values lie in [-1, 1]; synthetic ones may leave it."


def _shape(public: Public) -> str:
    names = "channels x height x width" if public.is_image else "features"
    return f"{' x '.join(map(str, public.shape))} ({names})"


def _inline(text: str) -> str:
    """Keep foreign text from becoming markup: one line, no table cells, no tags."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
