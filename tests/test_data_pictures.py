"""Pictures in files: what is read, that streaming gives what memory gives, and bad files by their names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import tfdist
import tfdist.data
from tests.shared_data import FILES, needs
from tests.test_data_pipeline import assert_same_batches, batches_of_ranks, segmenter
from tfdist.data.formats import coco, local_files
from tfdist.data.input import augmentation, disk_cache, order, pictures
from tfdist.data.input.division import Division
from tfdist.errors import DataError, UsageError
from tfdist.jobs.world import World

SEED = 3


def camvid(folder: Path, examples: int = 8, **options):
    return tfdist.data.load("segmentation_folder", folder, validation=None, test=None, **options).limit(examples)


@pytest.fixture
def some_camvid(tmp_path) -> Path:
    """Ten of CamVid's examples, to be damaged."""
    lines = (FILES / "camvid" / "train.txt").read_text().splitlines()[:10]
    for name in (name for line in lines for name in line.split()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(FILES / "camvid" / name, tmp_path / name)
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def names(folder: Path, number: int) -> list[Path]:
    """Picture and mask of an example."""
    return [folder / name for name in (folder / "train.txt").read_text().splitlines()[number].split()]


# What is read


@needs("camvid")
def test_a_list_of_pictures_and_masks_is_read_as_it_is():
    data = tfdist.data.load("segmentation_folder", FILES / "camvid").limit(5)
    assert data.spec.examples == {"train": 5, "validation": 101, "test": 233}
    assert data.spec.input_shape == (180, 240, 3) and data.spec.target_shape == (180, 240)
    assert (data.spec.classes, data.spec.ignored_class) == (12, 11)
    x, y = data.arrays("train")
    picture, mask = names(FILES / "camvid", 3)
    np.testing.assert_array_equal(y[3], np.asarray(Image.open(mask)))
    assert np.abs(x[3] * 255 - np.asarray(Image.open(picture))).mean() < 2  # of 255; two JPEG decoders
    assert x.dtype == np.float32 and y.dtype == np.int32


@needs("camvid")
def test_folders_of_pictures_and_masks_are_paired_by_name(some_camvid):
    by_list = camvid(some_camvid, 10).arrays("train")
    by_folder = camvid(some_camvid, 10, train="train,trainannot").arrays("train")
    order = np.argsort([names(some_camvid, number)[0].name for number in range(10)])
    np.testing.assert_array_equal(by_folder[1], by_list[1][order])
    names(some_camvid, 4)[1].unlink()
    with pytest.raises(DataError, match=r"has no mask in .*trainannot` \(1 of 10 pictures have none\)"):
        camvid(some_camvid, 10, train="train,trainannot")
    with pytest.raises(DataError, match="There are no pictures in `nothing,trainannot`"):
        camvid(some_camvid, train="nothing,trainannot")
    with pytest.raises(UsageError, match="`train` is `a,b,c`"):
        camvid(some_camvid, train="a,b,c")
    (some_camvid / "train.txt").write_text("train/a.jpg\n")
    with pytest.raises(DataError, match=r"Line 1 of .* is `train/a.jpg`, which is not a picture and a mask"):
        camvid(some_camvid)


@pytest.fixture
def folder_of_classes(tmp_path) -> Path:
    """Four pictures a class of different sizes; the class is the brightness."""
    for label, name in enumerate(("dark", "grey", "light")):
        for number, size in enumerate(((20, 20), (40, 20), (20, 40), (33, 37))):
            path = tmp_path / "train" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, (100 * label,) * 3).save(path)
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    return tmp_path


def test_a_folder_of_pictures_by_class_is_read_at_one_size(folder_of_classes):
    data = tfdist.data.load("image_folder", folder_of_classes, size=(16, 12))
    assert data.spec.class_names == ("dark", "grey", "light")
    assert data.spec.examples == {"train": 12, "validation": 12, "test": 0}
    x, y = data.arrays("train")
    assert x.shape == (12, 16, 12, 3) and Counter(y.tolist()) == {0: 4, 1: 4, 2: 4}
    assert len({*data.limit(6).arrays("train")[1].tolist()}) == 3
    np.testing.assert_allclose(x[:, 3, 3, 0], y * 100 / np.float32(255), rtol=1e-6)
    assert tfdist.data.load("image_folder", folder_of_classes).spec.input_shape == (20, 20, 3)
    grey = tfdist.data.load("image_folder", folder_of_classes, channels=1)
    assert grey.arrays("train")[0].shape == (12, 20, 20, 1)
    divided = tfdist.data.load("image_folder", folder_of_classes / "train")
    assert divided.spec.examples == {"train": 10, "validation": 1, "test": 1}


def test_files_are_told_apart_by_names_sizes_and_labels_wherever_their_folder_lies(folder_of_classes, tmp_path_factory):
    def listing(folder):
        return tfdist.data.load("image_folder", folder, size=(8, 8)).files["train"].listing()

    found = listing(folder_of_classes)
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(folder_of_classes, copy)
    assert listing(copy) == found
    picture = sorted((copy / "train").rglob("*.png"))[-1]
    picture.write_bytes(picture.read_bytes() + b"0")
    assert listing(copy) != found
    shutil.copytree(folder_of_classes, copy, dirs_exist_ok=True)
    picture.rename(picture.with_name("renamed.png"))
    assert listing(copy) != found


def test_a_flat_folder_is_divided_in_the_proportions_of_its_classes(tmp_path):
    for name, count in (("many", 60), ("some", 30), ("few", 10)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (4, 4)).save(tmp_path / name / f"{number}.png")
    data = tfdist.data.load("image_folder", tmp_path)
    counts = {split: np.bincount(data.arrays(split)[1]).tolist() for split in tfdist.data.SPLITS}
    assert counts == {"train": [8, 48, 24], "validation": [1, 6, 3], "test": [1, 6, 3]}
    assert len({*data.limit(10).arrays("train")[1].tolist()}) > 1  # the classes are mixed


HIDDEN = (".thumbs/1.png", ".ipynb_checkpoints/1.png", "__MACOSX/1.png", "@eaDir/1.png")


@pytest.mark.parametrize("layout", ["train", "."])
def test_hidden_folders_and_those_of_systems_are_no_classes_and_hidden_files_no_pictures(folder_of_classes, layout):
    folder = folder_of_classes / ("" if layout == "train" else "train")
    before = tfdist.data.load("image_folder", folder, size=8)
    for split in folder_of_classes.iterdir():
        for name in (*HIDDEN, "dark/._1.png", "light/.1.png"):
            (split / name).parent.mkdir(exist_ok=True)
            (split / name).write_bytes(b"no picture")
    data = tfdist.data.load("image_folder", folder, size=8)
    assert (data.spec.class_names, data.spec.examples) == (before.spec.class_names, before.spec.examples)
    assert data.arrays("train")[0].shape == before.arrays("train")[0].shape


def test_hidden_files_are_no_masks_and_match_no_pattern(tmp_path):
    for name in ("train/1.png", "masks/1.png", "train/._1.png", "masks/._1.png", "train/.thumbs/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / name)
    options = {"train": "train,masks", "validation": None, "test": None}
    assert tfdist.data.load("segmentation_folder", tmp_path, **options).spec.examples["train"] == 1
    found = [path.name for path in local_files.find(tmp_path / "train", "*.png", "any", "train")]
    assert found == ["1.png"]
    assert len(local_files.find(tmp_path / "train", "._1.png", "any", "train")) == 1  # which is named


def test_one_number_is_height_and_width(folder_of_classes):
    assert tfdist.data.load("image_folder", folder_of_classes, size=8).spec.input_shape == (8, 8, 3)
    with pytest.raises(UsageError, match="as `size`"):
        tfdist.data.load("image_folder", folder_of_classes, size=0)


def test_a_picture_of_another_shape_keeps_its_ratio_and_loses_its_margins(tmp_path):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 10:30] = 200  # the middle square
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "train" / name / "1.png")
    x, _ = tfdist.data.load("image_folder", tmp_path, size=(10, 10)).arrays("train")
    assert (x[:, :, 1:-1] == np.float32(200 / 255)).all()


def test_folders_that_are_no_dataset_are_refused(folder_of_classes, tmp_path):
    (folder_of_classes / "val" / "other").mkdir()
    with pytest.raises(
        DataError, match=r"`.*val/other` is not a class of the training pictures, which have dark, grey"
    ):
        tfdist.data.load("image_folder", folder_of_classes)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no folders with pictures"):
        tfdist.data.load("image_folder", tmp_path / "empty")
    with pytest.raises(UsageError, match="`cache` is `disc`"):
        tfdist.data.load("image_folder", folder_of_classes / "train", cache="disc")


@needs("coco-tiny")
def test_coco_is_read_from_its_own_folders():
    data = tfdist.data.load("coco_folder", FILES / "coco-tiny", size=(96, 128), validation=0.25)
    assert data.spec.examples == {"train": 24, "validation": 8, "test": 6}
    assert data.spec.classes == 81 and data.spec.class_names[:3] == ("background", "person", "bicycle")
    x, y = data.arrays("test")
    assert x.shape == (6, 96, 128, 3) and y.shape == (6, 96, 128)
    assert 0.1 < (y > 0).mean() < 0.9 and len(np.unique(y)) > 10


@needs("coco-tiny")
def test_masks_of_coco_cover_the_areas_of_their_annotations():
    file = FILES / "coco-tiny" / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    crowds = polygons = 0
    for annotation in content["annotations"]:
        picture = next(p for p in content["images"] if p["id"] == annotation["image_id"])
        size = (picture["height"], picture["width"])
        mask = coco.draw(coco.Instances(size, [(7, annotation["segmentation"])]))
        assert mask.shape == size and set(np.unique(mask)) <= {0, 7}
        rows, columns = np.nonzero(mask)
        left, top, width, height = annotation["bbox"]
        # A polygon has the pixels whose middle is inside; its box is rounded to a hundredth, a crowd's to a pixel.
        before, after = (1.5, 1.5) if annotation["iscrowd"] else (0.51, -0.49)
        assert columns.min() >= left - before and columns.max() <= left + width + after
        assert rows.min() >= top - before and rows.max() <= top + height + after
        crowds += annotation["iscrowd"]
        if annotation["iscrowd"]:
            assert len(rows) == sum(annotation["segmentation"]["counts"][1::2])
        elif len(annotation["segmentation"]) == 1 and annotation["area"] > 2000:
            polygons += 1
            assert len(rows) == pytest.approx(annotation["area"], rel=0.01)
    assert crowds == 4 and polygons > 50


def test_a_polygon_has_the_pixels_whose_middle_is_inside():
    def drawn(*polygons, size=(5, 6)):
        return coco.draw(coco.Instances(size, [(1, list(polygons))])).tolist()

    rectangle, of_two_parts = [1.4, 1, 4.6, 1, 4.6, 3.5, 1.4, 3.5], [0, 0, 2, 0, 2, 2, 0, 2]
    assert drawn(rectangle)[1:3] == [[0, 1, 1, 1, 1, 0]] * 2
    assert np.sum(drawn(rectangle)) == 8
    assert drawn(of_two_parts, [1, 1, 9, 1, 9, 9, 1, 9], size=(3, 3)) == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    crossing_itself = [0, 0, 6, 0, 0, 5, 6, 5]
    assert drawn(crossing_itself) == [
        [0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 0],
        [0] * 6,
        [0, 0, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 0],
    ]


# The strings are those of COCO's own tool, `pycocotools` 2.0.11.
@pytest.mark.parametrize(
    ("size", "compressed", "counts"),
    [
        ((3, 4), "32111N", [3, 2, 1, 3, 2, 1]),
        ((100, 40), "a03`U1U1ajNlj01mSO1Xi1", [17, 3, 1200, 40, 1, 900, 2, 1, 3, 1833]),
    ],
)
def test_compressed_run_lengths_are_those_that_cocos_tool_wrote(size, compressed, counts):
    assert coco.outline_of({"size": size, "counts": compressed}) == {"size": size, "counts": counts}


@needs("coco-tiny")
def test_coco_files_that_do_not_fit_are_refused(tmp_path):
    for folder in ("images", "annotations"):
        shutil.copytree(FILES / "coco-tiny" / folder, tmp_path / folder)
    file = tmp_path / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["images"][0]["height"] += 5
    file.write_text(json.dumps(content))
    name = content["images"][0]["file_name"]
    data = tfdist.data.load("coco_folder", tmp_path, size=(32, 32))
    with pytest.raises(DataError, match=rf"The mask of `.*{name}` is \d+x\d+, but its picture `.*` is \d+x\d+"):
        data.arrays("test")
    content["categories"] = content["categories"][1:]
    content["annotations"] = []
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="The training and test pictures of `coco_folder` have different"):
        tfdist.data.load("coco_folder", tmp_path)
    runs = {"size": [4, 4], "counts": "61X13mN000`0"}
    picture = content["images"][0]["id"]
    content["annotations"] = [{"image_id": picture, "category_id": 90, "area": 3, "segmentation": runs}]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"ValueError run lengths add up to -?\d+, but the picture has 4x4 pixels"):
        tfdist.data.load("coco_folder", tmp_path)
    file.write_text("{}")
    with pytest.raises(DataError, match="is not a file of COCO's instances: KeyError 'categories'"):
        tfdist.data.load("coco_folder", tmp_path)
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(DataError, match="has the annotations of `train2017`, but not its pictures"):
        tfdist.data.load("coco_folder", tmp_path)


# Streaming


@pytest.mark.sampled(1)
@needs("camvid")
@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_streamed_batches_are_those_of_memory(augment):
    memory, streamed = (camvid(FILES / "camvid", 10, size=(45, 60), cache=cache) for cache in ("memory", "off"))
    expected = batches_of_ranks(memory, 4, 1, augment=augment, epoch=1)
    assert_same_batches(batches_of_ranks(streamed, 4, 1, augment=augment, epoch=1), expected)


@pytest.mark.sampled(1)
@needs("camvid")
@pytest.mark.parametrize("augment", ["none", "resized_crop"])
def test_what_is_kept_on_the_disk_is_what_was_decoded(some_camvid, augment, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TFDIST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    data, again = (camvid(some_camvid, 10, size=(45, 60), cache=cache) for cache in ("off", "disk"))
    for epoch in range(2):
        expected = batches_of_ranks(data, 4, 1, augment=augment, epoch=epoch)
        assert_same_batches(batches_of_ranks(again, 4, 1, augment=augment, epoch=epoch), expected)
    (kept,) = disk_cache.root().rglob("*.data")
    assert kept.stat().st_size == 10 * (8 + 180 * 240 * (3 + 4))
    picture, _ = names(some_camvid, 3)
    picture.write_bytes(names(some_camvid, 4)[0].read_bytes())
    data, again = (camvid(some_camvid, 10, size=(45, 60), cache=cache) for cache in ("off", "disk"))
    expected = batches_of_ranks(data, 4, 1, augment=augment)
    assert_same_batches(batches_of_ranks(again, 4, 1, augment=augment), expected)


def test_labels_are_kept_on_the_disk_too(folder_of_classes, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TFDIST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    data, again = (tfdist.data.load("image_folder", folder_of_classes, cache=cache) for cache in ("off", "disk"))
    expected = batches_of_ranks(data, 5, 1)
    for _ in range(2):
        assert_same_batches(batches_of_ranks(again, 5, 1), expected)


def test_pictures_that_are_decoded_in_another_way_are_kept_apart(folder_of_classes, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TFDIST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(disk_cache, "BYTES_BETWEEN_ROWS", 0)  # others find what was written at once
    for channels in (3, 1):
        options = {"size": 16, "channels": channels}
        data, again = (tfdist.data.load("image_folder", folder_of_classes, cache=c, **options) for c in ("off", "disk"))
        assert_same_batches(batches_of_ranks(again, 5, 1), batches_of_ranks(data, 5, 1))


@needs("camvid")
def test_where_examples_are_kept_follows_from_their_size(monkeypatch):
    data = camvid(FILES / "camvid", 10)
    crop = augmentation.RESIZED_CROP
    assert (data.cache_of("train"), data.cache_of("train", crop)) == ("memory", "disk")
    monkeypatch.setattr(pictures, "SHARE_OF_MEMORY", 0)
    assert (data.cache_of("train"), data.limit(9).cache_of("train")) == ("memory", "disk")  # it stays as it is
    monkeypatch.setattr(pictures, "SHARE_OF_DISK", 0)
    assert data.limit(9).cache_of("train") == "off"


@pytest.mark.thorough
@needs("camvid")
def test_crops_of_whole_pictures_are_the_same_for_any_number_of_ranks_and_from_any_batch():
    data = camvid(FILES / "camvid", 10, size=(45, 60), cache="off")
    options = {"augment": "resized_crop", "epoch": 1}
    alone = batches_of_ranks(data, 4, 1, **options)
    assert [len(x) for x, _ in alone] == [4, 4, 2]
    for world_size in (2, 3):
        assert_same_batches(batches_of_ranks(data, 4, world_size, **options), alone)
    assert_same_batches(batches_of_ranks(data, 4, 3, first_batch=2, **options), alone[2:])
    assert not list(data.pipeline("train", 4, first_batch=3))


def test_every_file_comes_once_also_where_a_rank_has_no_part_of_the_last_batch(folder_of_classes):
    data = tfdist.data.load("image_folder", folder_of_classes, cache="off", size=(4, 4))
    ranks = [[y.numpy() for _, y in data.pipeline("train", 11, world=World(rank, 3))] for rank in range(3)]
    assert [[len(y) for y in batches] for batches in ranks] == [[4, 1], [4, 0], [3, 0]]
    assert Counter(np.concatenate([y for batches in ranks for y in batches]).tolist()) == {0: 4, 1: 4, 2: 4}


@pytest.mark.thorough
def test_batches_of_files_are_whole_where_the_last_part_of_a_rank_is_shorter_or_longer(folder_of_classes):
    for name in ("dark", "grey", "light"):
        shutil.copy(folder_of_classes / "train" / name / "0.png", folder_of_classes / "train" / name / "4.png")
    data = tfdist.data.load("image_folder", folder_of_classes, cache="off", size=(4, 4))

    def lengths(batch_size: int, rank: int) -> list[int]:
        return [len(y) for _, y in data.pipeline("train", batch_size, world=World(rank, 5))]

    assert (lengths(8, 1), lengths(8, 2), lengths(4, 4)) == ([2, 1], [1, 2], [0, 0, 0, 0])
    assert_same_batches(batches_of_ranks(data, 8, 5), batches_of_ranks(data, 8, 1))
    assert_same_batches(batches_of_ranks(data, 4, 5), batches_of_ranks(data, 4, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("replicas_of_a_rank", [1, 2])
def test_a_rank_reads_only_what_its_replicas_take_of_a_global_batch(folder_of_classes, replicas_of_a_rank):
    data = tfdist.data.load("image_folder", folder_of_classes, cache="off", size=(4, 4))
    (whole, *_), replicas = batches_of_ranks(data, 7, 1), 2 * replicas_of_a_rank
    labels, shares = [], 0.0
    for rank in range(2):
        feed = data.feed("train", 7, seed=SEED, world=World(rank, 2))
        fetched = feed.batches.fetch(feed.start(0, 0), tf.constant(0))
        assert len(fetched[0][1]) == (4 if rank == 0 else 3) and (feed.num_batches, feed.examples) == (2, 12)
        for index in range(rank * replicas_of_a_rank, (rank + 1) * replicas_of_a_rank):
            (_, y), share = feed.batches.part(None, fetched, index, Division(replicas))
            labels += y.numpy().tolist()
            shares += float(share)
            assert float(share) == pytest.approx(len(y) / 7)
    assert labels == whole[1].tolist() and shares == pytest.approx(1)


def test_a_rank_reads_its_proportion_of_a_global_batch(folder_of_classes):
    data = tfdist.data.load("image_folder", folder_of_classes, cache="off", size=(4, 4))
    (whole, *_), labels = batches_of_ranks(data, 7, 1), []
    for rank, examples in enumerate((5, 2)):
        feed = data.feed("train", 7, seed=SEED, world=World(rank, 2, speeds=(2, 1)))
        fetched = feed.batches.fetch(feed.start(0, 0), tf.constant(0))
        (_, y), share = feed.batches.part(None, fetched, rank, Division(2, (2, 1)))
        assert len(fetched[0][1]) == len(y) == examples and float(share) == pytest.approx(examples / 7)
        labels += y.numpy().tolist()
        with pytest.raises(UsageError, match="other `speeds` than the world"):
            feed.batches.part(None, fetched, rank, Division(2))
    assert labels == whole[1].tolist()


@pytest.mark.thorough
def test_a_computed_order_of_files_is_the_same_for_any_number_of_ranks_and_from_any_batch(
    folder_of_classes, monkeypatch
):
    monkeypatch.setattr(order, "LARGEST_DRAWN", 4)
    monkeypatch.setattr("tfdist.data.input.file_feed.AT_ONCE", 7)
    memory, streamed = (
        tfdist.data.load("image_folder", folder_of_classes, cache=cache, size=(4, 4)) for cache in ("memory", "off")
    )
    for augment in ("none", "crop_flip"):
        expected = batches_of_ranks(memory, 5, 1, augment=augment, epoch=1)
        for world_size in (1, 2, 7):
            assert_same_batches(batches_of_ranks(streamed, 5, world_size, augment=augment, epoch=1), expected)
        resumed = batches_of_ranks(streamed, 5, 2, augment=augment, epoch=1, first_batch=1)
        assert_same_batches(resumed, expected[1:])


def test_ranks_can_have_whole_files_of_some_of_the_examples(folder_of_classes):
    data = tfdist.data.load("image_folder", folder_of_classes, size=(4, 4)).limit(7)
    ranks = [list(data.pipeline("train", 4, world=World(rank, 2), by_file=True)) for rank in range(2)]
    assert [[len(y) for _, y in batches] for batches in ranks] == [[2, 2], [2, 1]]
    assert sorted(np.concatenate([y for batches in ranks for _, y in batches])) == sorted(data.arrays("train")[1])


def test_ranks_can_have_whole_files(folder_of_classes):
    data = tfdist.data.load("image_folder", folder_of_classes, size=(4, 4))
    ranks = [list(data.pipeline("train", 5, world=World(rank, 2), by_file=True)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [3, 3]
    assert Counter(np.concatenate([y for batches in ranks for _, y in batches]).tolist()) == {0: 4, 1: 4, 2: 4}


@pytest.mark.thorough
@needs("camvid")
def test_training_on_files_gives_the_weights_of_training_in_memory_on_any_number_of_replicas():
    weights = []
    for strategy, cache in (("single", "memory"), ("single", "off"), ("custom", "off")):
        data = camvid(FILES / "camvid", 10, size=(45, 60), cache=cache)
        chosen = tfdist.strategy(strategy, devices=2 if strategy == "custom" else 1, seed=SEED)
        model = segmenter(chosen, data.spec)
        feed = data.feed("train", 4, seed=SEED, augment="crop_flip")
        history = chosen.fit(model, feed, epochs=2, verbose=0, validation_data=data.feed("train", 4, shuffle=False))
        assert len(history.history["val_loss"]) == 2
        weights.append(np.concatenate([weight.reshape(-1) for weight in model.get_weights()]))
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_allclose(weights[0], weights[2], atol=5e-5)


# Bad files


DAMAGES = ("truncated", "missing", "mask_of_another_size", "label_outside")


def damage(folder: Path, what: str) -> tuple[Path, str]:
    """Damages an example, another one for each damage; the path that has to be named, and what has to be said."""
    picture, mask = names(folder, 3 + DAMAGES.index(what))
    if what == "truncated":
        picture.write_bytes(picture.read_bytes()[:-4000])
        return picture, "cannot be decoded"
    if what == "missing":
        picture.unlink()
        return picture, "does not exist"
    if what == "mask_of_another_size":
        Image.open(mask).resize((120, 90), Image.Resampling.NEAREST).save(mask)
        return mask, "is 90x120, but its picture"
    pixels = np.array(Image.open(mask))
    pixels[10, 20] = 77
    Image.fromarray(pixels).save(mask)
    return mask, "has the label 77, outside the 12 classes"


@needs("camvid")
@pytest.mark.parametrize("what", DAMAGES)
def test_a_bad_file_is_named(some_camvid, what):
    path, message = damage(some_camvid, what)
    with pytest.raises(DataError, match=f"`{path}` {message}") as caught:
        camvid(some_camvid, 10, cache="memory").arrays("train")
    assert "`--on-bad-example skip`" in caught.value.hint


@pytest.mark.thorough
@needs("camvid")
def test_bad_files_are_left_out_and_counted(some_camvid):
    good = tfdist.data.load("segmentation_folder", some_camvid, validation=None, test=None).arrays("train")[1]
    told = [damage(some_camvid, what) for what in DAMAGES]
    options = {"validation": None, "test": None, "on_bad_example": "skip", "cache": "off"}
    data = tfdist.data.load("segmentation_folder", some_camvid, **options)
    assert data.spec.examples["train"] == 6 and len(data.skipped) == 4
    for sentence, (path, message) in zip(data.skipped, told, strict=True):
        assert str(path) in sentence and message in sentence
    left = np.concatenate([y for _, y in data.pipeline("train", 4, shuffle=False)])
    np.testing.assert_array_equal(left, good[[0, 1, 2, 7, 8, 9]])


@pytest.mark.thorough
def test_leaving_out_bad_files_does_not_start_tensorflow(folder_of_classes):
    (folder_of_classes / "train" / "grey" / "1.png").write_bytes(b"no picture")
    code = (
        "import sys, tfdist.data; "
        f"source = tfdist.data.load('image_folder', {str(folder_of_classes)!r}, size=(4, 4), on_bad_example='skip'); "
        "assert source.spec.examples['train'] == 11 and len(source.skipped) == 1, source.skipped; "
        "assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(1)
@needs("camvid")
@pytest.mark.parametrize("what", ["truncated", "label_outside"])
def test_a_bad_file_is_named_when_training_meets_it(some_camvid, what):
    path, message = damage(some_camvid, what)
    data = camvid(some_camvid, 10, cache="off")
    strategy = tfdist.strategy("single", seed=SEED)
    with pytest.raises(DataError, match=f"`{path}` {message}"):
        strategy.fit(segmenter(strategy, data.spec), data.feed("train", 4, seed=SEED), verbose=0)


def test_another_error_of_tensorflow_comes_through(folder_of_classes):
    data = tfdist.data.load("image_folder", folder_of_classes, cache="off", size=(4, 4))
    feed = data.feed("train", 4)
    with pytest.raises(tf.errors.InvalidArgumentError), feed.naming_bad_examples(0, 3):
        raise tf.errors.InvalidArgumentError(None, None, "of the model's")


def test_the_first_picture_must_be_readable_to_know_the_size(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "1.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"The first picture, `.*1.jpg`, cannot be read") as caught:
        tfdist.data.load("image_folder", tmp_path)
    assert "size=64,64" in caught.value.hint


def test_the_processes_of_a_machine_divide_the_memory_for_decoded_pictures(folder_of_classes, monkeypatch):
    def cache():
        data = tfdist.data.load("image_folder", folder_of_classes, cache="auto", size=(4, 4))
        decoded_bytes = 4 * data.spec.examples["train"] * (4 * 4 * 3 + 1)
        memory = SimpleNamespace(available=2 * decoded_bytes / pictures.SHARE_OF_MEMORY)
        monkeypatch.setattr(pictures.psutil, "virtual_memory", lambda: memory)
        return data.cache_of("train")

    assert cache() == "memory"
    cluster = {"worker": [f"localhost:{port}" for port in range(2000, 2004)]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    assert cache() != "memory"
