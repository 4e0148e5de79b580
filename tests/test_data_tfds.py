"""Datasets of TensorFlow Datasets, in small: prepared by its own writer with their real features, read by us."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

import tfdist.data
from tests.shared_data import FILES, needs
from tests.test_data import file_server, no_network  # noqa: F401 - a fixture
from tests.test_data_pipeline import assert_same_batches, batches_of_ranks
from tfdist.data.formats import tfds
from tfdist.errors import DataError, UnknownNameError


def prepare_small(name: str, folder: Path, examples: dict[str, list[dict]]) -> None:
    """Prepares the dataset `name` in `folder` with these examples a split."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    builder = tfds.builder(name, data_dir=folder)
    builder._split_generators = lambda manager: {
        split: iter(enumerate(of_split)) for split, of_split in examples.items()
    }
    manual = folder / "downloads" / "manual"
    manual.mkdir(parents=True, exist_ok=True)
    config = tfds.download.DownloadConfig(manual_dir=manual, try_download_gcs=False)
    builder.download_and_prepare(download_dir=folder / "downloads", download_config=config)


def picture(number: int, side: int = 40) -> np.ndarray:
    return np.full((side, side + 10, 3), 20 * number, np.uint8)


def cifar(count: int, classes: int) -> list[dict]:
    coarse = {"coarse_label": 3} if classes == 100 else {}
    return [
        {"id": str(number), "image": picture(number % 10, 32)[:, :32], "label": number % classes, **coarse}
        for number in range(count)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("classes", [100, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_cifar_comes_decoded(tmp_path, classes):
    prepare_small(f"cifar{classes}", tmp_path, {"train": cifar(5020, classes), "test": cifar(10, classes)})
    data = tfdist.data.load(f"cifar{classes}", tmp_path)
    assert data.spec.examples == {"train": 20, "validation": 5000, "test": 10}
    assert data.spec.classes == classes and data.spec.input_shape == (32, 32, 3)
    assert len(data.spec.class_names) == classes
    x, y = data.arrays("test")
    order = np.argsort(y)
    np.testing.assert_allclose(x[order, 0, 0, 0], np.arange(10) * 20 / 255, rtol=1e-6)


@pytest.mark.thorough
def test_imagenet_is_read_from_where_its_pictures_lie(tmp_path):
    examples = [{"file_name": f"{number}.JPEG", "image": picture(number), "label": number} for number in range(10)]
    prepare_small("imagenet2012", tmp_path, {"train": examples * 10, "validation": examples[:3], "test": examples[:1]})
    data = tfdist.data.load("imagenet2012", tmp_path, size=(16, 16), cache="off")
    assert data.spec.examples == {"train": 99, "validation": 1, "test": 3} and data.spec.classes == 1000
    for augment in ("none", "resized_crop"):
        alone = batches_of_ranks(data, 16, 1, augment=augment)
        x, y = (np.concatenate(parts) for parts in zip(*alone, strict=True))
        assert x.shape == (99, 16, 16, 3) and set(np.bincount(y)) <= {9, 10}
        assert np.abs(x[:, 8, 8, 0] * 255 - 20 * y).max() < 3  # JPEG
        assert_same_batches(batches_of_ranks(data, 16, 2, augment=augment, first_batch=5), alone[5:])
    in_memory = tfdist.data.load("imagenet2012", tmp_path, size=(16, 16)).arrays("test")
    assert sorted(in_memory[1].tolist()) == [0, 1, 2]


def test_imagenet_without_files_says_which_ones_to_bring_and_where_to(tmp_path, no_network):  # noqa: F811
    with pytest.raises(DataError) as caught:
        tfdist.data.load("imagenet2012", tmp_path)
    manual = tmp_path / "downloads" / "manual"
    assert f"`{manual}` has no `ILSVRC2012_img_train.tar` and no `ILSVRC2012_img_val.tar`" in caught.value.sentence
    assert "https://image-net.org/download-images" in caught.value.hint
    manual.mkdir(parents=True)
    (manual / "ILSVRC2012_img_train.tar").touch()
    with pytest.raises(DataError, match=r"has no `ILSVRC2012_img_val\.tar`"):
        tfdist.data.load("imagenet2012", tmp_path)


def pets(count: int) -> list[dict]:
    mask = np.concatenate([np.full((40, 25, 1), 1, np.uint8), np.full((40, 25, 1), 2, np.uint8)], axis=1)
    mask[0] = 3
    import tensorflow_datasets as tfds

    facts = {"label": 0, "species": 0, "head_bbox": tfds.features.BBox(0.0, 0.0, 1.0, 1.0)}
    return [{"file_name": str(n), "image": picture(n % 10), "segmentation_mask": mask, **facts} for n in range(count)]


@pytest.mark.thorough
def test_pets_have_masks_of_three_classes_from_0(tmp_path):
    prepare_small("oxford_iiit_pet", tmp_path, {"train": pets(10), "test": pets(4)})
    data = tfdist.data.load("oxford_iiit_pet", tmp_path, size=(20, 25))
    assert data.spec.task == "segmentation" and data.spec.class_names == ("pet", "background", "border")
    assert data.spec.examples == {"train": 9, "validation": 1, "test": 4}
    x, y = data.arrays("train")
    assert x.shape == (9, 20, 25, 3) and y.shape == (9, 20, 25)
    assert (y[:, 0] == 2).all() and (y[:, 2:, :11] == 0).all() and (y[:, 2:, 14:] == 1).all()
    file = next(tmp_path.rglob("*train.tfrecord*"))
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(DataError, match=f"`{file}` ends within a record"):
        tfdist.data.load("oxford_iiit_pet", tmp_path)
    file.write_bytes(content.replace(b"\xff\xd8\xff", b"\x00\x00\x00", 1))  # the first JPEG begins so no more
    with pytest.raises(DataError, match=rf"`byte \d+ of {file}` cannot be decoded"):
        tfdist.data.load("oxford_iiit_pet", tmp_path).arrays("train")
    left = tfdist.data.load("oxford_iiit_pet", tmp_path, on_bad_example="skip")
    assert sum(left.spec.examples.values()) == 13 and len(left.skipped) == 1


def test_reviews_become_numbers_of_words(tmp_path):
    reviews = [{"text": f"<br />A {'good' if n % 2 else 'bad'} film, number {n}!", "label": n % 2} for n in range(20)]
    prepare_small("imdb_reviews", tmp_path, {"train": reviews, "test": reviews[:6], "unsupervised": reviews[:1]})
    data = tfdist.data.load("imdb_reviews", tmp_path, length=10)
    assert data.spec.examples == {"train": 18, "validation": 2, "test": 6}
    assert data.spec.class_names == ("negative", "positive") and "br" not in data.spec.vocabulary
    x, y = data.arrays("train")
    good = data.spec.vocabulary.index("good")
    np.testing.assert_array_equal((x == good).any(axis=1), y == 1)
    file = next(tmp_path.rglob("*-train.tfrecord*"))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"Dataset `imdb_reviews` in .* is damaged"):
        tfdist.data.load("imdb_reviews", tmp_path)


def test_talks_become_pairs_of_sentences(tmp_path, no_network):  # noqa: F811
    talks = [{"pt": f"o número {n}", "en": f"the number {n}"} for n in range(10)]
    prepare_small("ted_hrlr_translate/pt_to_en", tmp_path, {"train": talks, "validation": talks[:2], "test": talks[:3]})
    data = tfdist.data.load("ted_hrlr_translate", tmp_path)
    assert data.spec.examples == {"train": 10, "validation": 2, "test": 3}
    assert "número" in data.spec.vocabulary and "number" in data.spec.target_vocabulary
    with pytest.raises(UnknownNameError, match="Unknown pair of languages `pt_to_pt`"):
        tfdist.data.load("ted_hrlr_translate", tmp_path, pair="pt_to_pt")


@pytest.mark.parametrize(
    "name", ["cifar10", "cifar100", "oxford_iiit_pet", "coco", "imdb_reviews", "ted_hrlr_translate"]
)
def test_without_network_and_files_one_error_names_the_folder(name, tmp_path, no_network):  # noqa: F811
    with pytest.raises(DataError, match=f"`{name}` is not prepared in `{tmp_path}` and cannot be downloaded"):
        tfdist.data.load(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs("coco-tiny")
def test_coco_is_read_where_its_archives_were_unpacked(tmp_path, no_network):  # noqa: F811
    places = {}
    for name in ("train2017", "val2017"):
        places[name] = f"downloads/{name}"
        shutil.copytree(FILES / "coco-tiny" / "images" / name, tmp_path / "downloads" / name / name)
    shutil.copytree(FILES / "coco-tiny" / "annotations", tmp_path / "downloads" / "a" / "annotations")
    (tmp_path / "coco.json").write_text(json.dumps(places | {"annotations": "downloads/a"}))
    data = tfdist.data.load("coco", tmp_path, size=(32, 32), validation=0.25)
    assert data.spec.name == "coco" and data.spec.examples == {"train": 24, "validation": 8, "test": 6}


def test_archives_are_fetched_once_checked_and_unpacked(tmp_path, monkeypatch):
    from tensorflow_datasets.core.download.checksums import UrlInfo

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("folder/file.txt", "content")
    body = packed.getvalue()
    with file_server({"/a.zip": body}) as (address, asked):
        info = UrlInfo(size=len(body), checksum=hashlib.sha256(body).hexdigest(), filename="a.zip")
        builder = types.SimpleNamespace(name="tiny", url_infos={f"{address}a.zip": info})
        for _ in range(2):
            there = tfds.extracted(builder, tmp_path, {"a": f"{address}a.zip"})
            assert (there["a"] / "folder" / "file.txt").read_text() == "content"
        assert len(asked) == 2  # whether it answers, and the file
    assert not os.path.isabs(json.loads((tmp_path / "tiny.json").read_text())["a"])


def test_a_truncated_archive_is_named_with_its_folder(tmp_path):
    archive = tmp_path / "downloads" / "archive.tar"
    archive.parent.mkdir()
    with tarfile.open(archive, "w") as tar:
        tar.add(__file__, "picture")
    archive.write_bytes(archive.read_bytes()[:3000])
    with (
        pytest.raises(
            DataError, match=f"an archive in `{archive.parent}` is incomplete or damaged: unexpected end"
        ) as e,
        tfds._fetching(types.SimpleNamespace(name="some"), tmp_path),
        tarfile.open(archive) as tar,
    ):
        tar.extractall(tmp_path, filter="data")
    assert "download the damaged one again" in e.value.hint
